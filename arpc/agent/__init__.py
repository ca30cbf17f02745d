"""Names, calls and dispatch. Knows no feature: handlers, reducers and interceptors are handed in."""
