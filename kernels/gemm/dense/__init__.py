"""GEMMs with BF16, FP16 or FP32 weights."""
