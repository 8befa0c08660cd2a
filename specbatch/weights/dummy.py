"""Models with random weights: the shapes of published ones, for speed and memory without a download."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from specbatch.models.config import ModelConfig
from specbatch.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    import torch

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN = {
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_QWEN2 = {**_QWEN, "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
_QWEN3 = {**_QWEN, "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960, "head_dim": 128}

# Published values, in the published spelling; "toy" is ours, for tests and first steps.
SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 32.0},
    },
    "llama-3.1-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
    },
    "qwen2.5-0.5b": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        **_QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """float32, on the CPU; it depends on the seed and its own name only.

    Matrices are normal with variance 1 / inputs and norms lie near 1, so that activations keep their size.
    """
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return values.mul_(1 / math.sqrt(shape[-1]))
    return values.mul_(0.1).add_(0.0 if name.endswith(".bias") else 1.0)


class DummyCheckpoint:
    """Seeded random weights of a given config (see `random_tensor`)."""

    def __init__(self, config: ModelConfig, *, name: str, seed: int, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.name = name
        self.origin = f"random weights, seed {seed}"
        self.bytes = 4 * config.parameter_count()
        self.mtp: dict[str, tuple[int, ...]] = {}
        self._seed = seed
        self._shapes = config.tensor_shapes()
        self._tokenizer = tokenizer

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> torch.Tensor:
        return random_tensor(name, self._shapes[name], self._seed)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer or ByteTokenizer(self.config.vocab_size)
