"""Room lock."""
