"""KV pages, prefix cache, recurrent states and the memory plan."""
