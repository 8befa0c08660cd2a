"""Gated delta rule, Mamba2 and short convolution."""
