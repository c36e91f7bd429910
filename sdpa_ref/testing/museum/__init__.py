"""The bug museum."""
