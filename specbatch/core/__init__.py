"""Data structures of an engine step: requests, device batch, attention metadata, acceptance counts."""
