"""What one step of the engine reads and writes."""
