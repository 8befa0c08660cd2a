"""GEMMs with fixed weights: skinny, FP8, and library GEMMs."""
