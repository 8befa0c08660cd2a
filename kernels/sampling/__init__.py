"""Sampling, acceptance of drafts and tree verification."""
