"""GEMMs with FP8, INT4 and MXFP4 weights."""
