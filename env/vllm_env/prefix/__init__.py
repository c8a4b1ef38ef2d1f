"""Room prefix."""
