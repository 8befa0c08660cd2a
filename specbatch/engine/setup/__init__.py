"""Builds an engine: checks, memory plan, models, caches, graphs."""
