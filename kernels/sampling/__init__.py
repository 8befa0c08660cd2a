"""From logits to committed tokens: sampling and verification."""
