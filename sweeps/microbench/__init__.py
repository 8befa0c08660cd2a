"""Timing of single operations."""
