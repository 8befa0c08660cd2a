"""Shared by the kernels: programmatic dependent launch, KV slots, uploads."""
