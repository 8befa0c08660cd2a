"""Attention of decode and verify steps."""
