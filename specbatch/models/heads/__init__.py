"""Networks of draft heads."""
