"""Random weights in the shapes of published models, to measure speed and memory without a download."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from specbatch.models.config import ModelConfig
from specbatch.models.formats.grouped import GroupedSource
from specbatch.models.weight_shapes import tensor_shapes, weight_shapes
from specbatch.text.tokenizer import ByteTokenizer, Tokenizer
from specbatch.weights.shapes import SHAPES

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


def random_tensor(
    name: str, shape: Shape, seed: int, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A random tensor that depends only on the seed, its name and the device. dtype: default float32.

    Matrices are normal with variance 1 / inputs and norms are near 1, so that activations keep their magnitude.
    """
    import torch

    generator = _generator(name, seed, device)
    values = torch.empty(shape, device=device, dtype=dtype or torch.float32)
    if len(shape) > 1:
        return values.normal_(generator=generator).mul_(1 / math.sqrt(shape[-1]))
    return values.normal_(generator=generator).mul_(0.1).add_(0.0 if name.endswith(".bias") else 1.0)


def _generator(name: str, seed: int, device: str | torch.device) -> torch.Generator:
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


class DummyCheckpoint:
    """Seeded random weights of a config, generated on `device`; values depend on the kind of device. A GPU generates
    them in place, in the config's dtype and with a layer's experts in one tensor, if their format has one, at the speed
    of its memory; a CPU in float32."""

    def __init__(
        self, config: ModelConfig, *, name: str, seed: int, tokenizer: Tokenizer | None, device: str = "cpu"
    ) -> None:
        stored = config.quantization
        self.config = config.stacked() if stored is None or stored.has_stacks else config
        self.name = name
        self.origin = f"random weights, seed {seed}"
        self.mtp: dict[str, tuple[int, ...]] = {}
        self.grouped: GroupedSource | None = None
        self.cache: dict[str, tuple[int, ...]] = {}
        self._seed = seed
        self._device = device
        self._dtype_name = "float32" if device == "cpu" else config.dtype or "float32"
        self._shapes = tensor_shapes(self.config)
        self._inputs = _inputs_of_parts(self.config)
        self._tokenizer = tokenizer
        self.bytes = sum(math.prod(shape) * self._item(name) for name, shape in self._shapes.items())

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        shape = self._shapes[name]
        if name in self._inputs:
            assert self.config.quantization is not None
            generator = _generator(name, self._seed, self._device)
            return self.config.quantization.random(name, shape, self._inputs[name], generator)
        return random_tensor(name, shape, self._seed, self._device, getattr(torch, self._dtype_name))

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer or ByteTokenizer(self.config.vocab_size)

    def _item(self, name: str) -> int:
        """Bytes per value."""
        if name in self._inputs:
            assert self.config.quantization is not None
            return self.config.quantization.random_item(name)
        return 4 if self._dtype_name == "float32" else 2


def _inputs_of_parts(config: ModelConfig) -> dict[str, int]:
    """The parts of quantized weights, and how many inputs these have."""
    stored = config.format_except_ends
    if stored is None:
        return {}
    weights = weight_shapes(config).items()
    quantized = [(name, shape) for name, shape in weights if stored.is_quantized(name, shape)]
    return {part: shape[-1] for name, shape in quantized for part in stored.parts(name, shape)}


__all__ = ["SHAPES", "DummyCheckpoint", "random_tensor"]
