"""GEMMs with fixed weights."""
