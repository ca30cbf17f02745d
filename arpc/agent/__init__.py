"""Names, calls and dispatch. Depends on no feature: handlers, reducers and interceptors are passed in."""
