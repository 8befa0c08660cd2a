"""Checkpoints: safetensors folders, GGUF files, hub repositories, known models and random weights."""

from specbatch.weights.checkpoint import Checkpoint, Log, Read, open_checkpoint, open_tokenizer, read_config

__all__ = ["Checkpoint", "Log", "Read", "open_checkpoint", "open_tokenizer", "read_config"]
