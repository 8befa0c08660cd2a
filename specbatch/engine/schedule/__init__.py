"""Scheduling: continuous batching, spec v1 and v2, and the runner that executes plans."""
