"""Who is in the group: how workers meet, what they know of each other, and who has come or left."""
