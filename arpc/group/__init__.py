"""Group membership: how workers meet, what they know of each other, and which workers have joined or left."""
