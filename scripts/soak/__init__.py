"""Workers under load are killed, stopped, cut off and restarted, and every call is accounted for: ``make soak``."""
