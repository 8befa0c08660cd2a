"""Checkpoints: safetensors folders, GGUF files, hub repositories, known models and random weights."""

from specbatch.weights.checkpoint import Checkpoint, Log, Read, read_config
from specbatch.weights.opening import open_checkpoint, open_tokenizer

__all__ = ["Checkpoint", "Log", "Read", "open_checkpoint", "open_tokenizer", "read_config"]
