"""Text and token ids: tokenizers, their files and special tokens, chat templates."""
