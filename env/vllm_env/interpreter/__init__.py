"""Room interpreter."""
