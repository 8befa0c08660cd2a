"""Drafting algorithms, one file each. `specbatch.algorithms` is their registry."""
