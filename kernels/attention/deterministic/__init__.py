"""Attention whose bits depend on a query's own keys alone."""
