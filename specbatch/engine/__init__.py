"""The engine: scheduling, the device step, prefill and scoring."""
