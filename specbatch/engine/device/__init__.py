"""The device side: decode step, prefill, acceptance, scoring."""
