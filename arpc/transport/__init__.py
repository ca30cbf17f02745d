"""Ways to move messages between two workers, behind one contract."""
