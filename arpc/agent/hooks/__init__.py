"""What watches or takes part in calls: interceptors, observers, timing, propagated variables, device placement."""
