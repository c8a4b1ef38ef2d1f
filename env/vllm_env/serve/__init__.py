"""Room serve."""
