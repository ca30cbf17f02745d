"""Kills, stops, cuts off and restarts workers under load, and accounts for every call: ``make soak``."""
