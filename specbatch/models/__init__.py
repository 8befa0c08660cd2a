"""Model families and their layers."""
