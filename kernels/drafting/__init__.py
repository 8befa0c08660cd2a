"""N-gram lookup, draft inputs and draft trees."""
