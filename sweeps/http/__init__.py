"""Servers of other engines over HTTP, as engines of a sweep."""
