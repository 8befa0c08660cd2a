"""Norms, activations, rotary embedding, FP8 quantization, gathers."""
