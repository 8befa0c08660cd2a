"""The engine against the limits of its device."""
