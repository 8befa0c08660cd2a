"""Attention over the paged KV cache: decode and verify, prefill, and cache writes."""
