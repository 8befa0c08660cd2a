"""Building blocks of decoder layers."""
