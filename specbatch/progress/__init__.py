"""Progress on standard error and the remaining time."""
