"""Models with random weights: the shapes of published ones, for speed and memory without a download."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from specbatch.kernels.gemm.weight import byte_chunks
from specbatch.models.config import ModelConfig
from specbatch.models.fp8 import SCALES
from specbatch.tokenizer import ByteTokenizer, Tokenizer
from specbatch.weights.shapes import SHAPES

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
# Of float8_e4m3fn where all bit patterns but the two that are no numbers come alike.
_FLOAT8_NORM = 100.06


def random_tensor(
    name: str, shape: Shape, seed: int, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """It depends on the seed, its own name and the device only; dtype: float32 if not given.

    Matrices are normal with variance 1 / inputs and norms lie near 1, so that activations keep their size.
    """
    import torch

    generator = _generator(name, seed, device)
    values = torch.empty(shape, device=device, dtype=dtype or torch.float32)
    if len(shape) > 1:
        return values.normal_(generator=generator).mul_(1 / math.sqrt(shape[-1]))
    return values.normal_(generator=generator).mul_(0.1).add_(0.0 if name.endswith(".bias") else 1.0)


def random_float8(name: str, shape: Shape, seed: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """float8_e4m3fn, made as bits: no wider copy of it is ever there. `random_scales` give it the size of others."""
    import torch

    bits = torch.empty(shape, device=device, dtype=torch.uint8).random_(
        0, 254, generator=_generator(name, seed, device)
    )
    for part in byte_chunks(bits):
        part += part >= 127  # 127 and 255 are NaN
    return bits.view(torch.float8_e4m3fn)


def random_scales(name: str, shape: Shape, inputs: int, seed: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """float32, each its own, for a float8 matrix of so many inputs."""
    import torch

    scales = torch.empty(shape, device=device).uniform_(0.8, 1.2, generator=_generator(name, seed, device))
    return scales.mul_(1 / (_FLOAT8_NORM * math.sqrt(inputs)))


def _generator(name: str, seed: int, device: str | torch.device) -> torch.Generator:
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


class DummyCheckpoint:
    """Seeded random weights of a given config, made on `device`, whose generator decides their values. A GPU makes them
    in the type that the config names, in place and a layer's experts in one tensor, at the speed of its memory; a CPU
    in float32."""

    def __init__(
        self, config: ModelConfig, *, name: str, seed: int, tokenizer: Tokenizer | None, device: str = "cpu"
    ) -> None:
        self.config = config.stacked()
        self.name = name
        self.origin = f"random weights, seed {seed}"
        self.mtp: dict[str, tuple[int, ...]] = {}
        self._seed = seed
        self._device = device
        self._wide = "float32" if device == "cpu" else config.dtype or "float32"
        self._shapes = self.config.tensor_shapes()
        self._tokenizer = tokenizer
        self.bytes = sum(math.prod(shape) * self._item(name) for name, shape in self._shapes.items())

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        shape, made = self._shapes[name], (self._seed, self._device)
        if self._is_float8(name):
            return random_float8(name, shape, *made)
        if name.endswith(SCALES):
            return random_scales(name, shape, self._shapes[name.removesuffix(SCALES)][-1], *made)
        return random_tensor(name, shape, *made, getattr(torch, self._wide))

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer or ByteTokenizer(self.config.vocab_size)

    def _is_float8(self, name: str) -> bool:
        return name + SCALES in self._shapes

    def _item(self, name: str) -> int:
        """Bytes of one of its values."""
        if self._is_float8(name):
            return 1
        return 4 if name.endswith(SCALES) or self._wide == "float32" else 2


__all__ = ["SHAPES", "DummyCheckpoint", "random_tensor"]
