"""Features that watch or take part in calls: interceptors, observers, timing, ContextVars, device placement."""
