"""Room publish."""
