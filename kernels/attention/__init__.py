"""Paged attention: verify, prefill and KV writes."""
