"""Drafting algorithms, one file each, and the verification of drafts. `specbatch.algorithms` lists them."""
