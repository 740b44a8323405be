"""Who asks, and what that allows."""
