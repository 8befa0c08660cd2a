"""Random weights in the shapes of published models, to measure speed and memory without a download."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from specbatch.kernels.gemm.quantized.weight import MX_BLOCK, byte_chunks
from specbatch.models.config import ModelConfig
from specbatch.models.formats import mxfp4
from specbatch.models.formats.fp8 import SCALES, scaled
from specbatch.models.formats.int4 import INTEGERS, Int4Weights, is_zeros
from specbatch.text.tokenizer import ByteTokenizer, Tokenizer
from specbatch.weights.shapes import SHAPES

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
# Root mean square of float8_e4m3fn values if all bit patterns except the two NaNs are equally likely.
_FP8_RMS = 100.06
_FP4_RMS = 2.93  # of 4-bit values, alike
_INT4_RMS = 4.64  # of whole numbers from -8 to 7
_EIGHTS = -0x77777778  # eight times the zero point 8, in an int32


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


def random_fp8(name: str, shape: Shape, seed: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """A random float8_e4m3fn tensor, generated as bits to avoid a larger copy. `random_scales` give it the magnitude of
    `random_tensor`."""
    import torch

    bits = torch.empty(shape, device=device, dtype=torch.uint8).random_(
        0, 254, generator=_generator(name, seed, device)
    )
    for part in byte_chunks(bits):
        part += part >= 127  # 127 and 255 are NaN
    return bits.view(torch.float8_e4m3fn)


def random_scales(name: str, shape: Shape, inputs: int, seed: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Random float32 scales of an FP8 matrix with `inputs` columns."""
    import torch

    scales = torch.empty(shape, device=device).uniform_(0.8, 1.2, generator=_generator(name, seed, device))
    return scales.mul_(1 / (_FP8_RMS * math.sqrt(inputs)))


def random_mxfp4(name: str, shape: Shape, inputs: int, seed: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Random blocks, or scales that give them the magnitude of `random_tensor`, of an MXFP4 matrix with `inputs`
    columns."""
    import torch

    generator, bits = _generator(name, seed, device), torch.empty(shape, device=device, dtype=torch.uint8)
    if name.endswith(mxfp4.BLOCKS):
        return bits.random_(0, 256, generator=generator)
    exponent = 127 + math.floor(math.log2(1 / (_FP4_RMS * math.sqrt(inputs))))
    return bits.random_(exponent, exponent + 2, generator=generator)


def random_int4(name: str, shape: Shape, inputs: int, seed: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """A part of a random INT4 matrix with `inputs` columns: values, zero points or float16 scales."""
    import torch

    if is_zeros(name):
        return torch.full(shape, _EIGHTS, dtype=torch.int32, device=device)
    generator = _generator(name, seed, device)
    if name.endswith(INTEGERS):
        return torch.empty(shape, dtype=torch.int32, device=device).random_(-(1 << 31), 1 << 31, generator=generator)
    scales = torch.empty(shape, device=device).uniform_(0.8, 1.2, generator=generator)
    return scales.mul_(1 / (_INT4_RMS * math.sqrt(inputs))).half()


def _generator(name: str, seed: int, device: str | torch.device) -> torch.Generator:
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


class DummyCheckpoint:
    """Seeded random weights of a config, generated on `device`; values depend on the kind of device. A GPU generates
    them in place, in the config's dtype and with a layer's experts in one tensor, at the speed of its memory; a CPU in
    float32."""

    def __init__(
        self, config: ModelConfig, *, name: str, seed: int, tokenizer: Tokenizer | None, device: str = "cpu"
    ) -> None:
        self.config = config.stacked()
        self.name = name
        self.origin = f"random weights, seed {seed}"
        self.mtp: dict[str, tuple[int, ...]] = {}
        self._seed = seed
        self._device = device
        self._dtype_name = "float32" if device == "cpu" else config.dtype or "float32"
        self._shapes = self.config.tensor_shapes()
        self._tokenizer = tokenizer
        self.bytes = sum(math.prod(shape) * self._item(name) for name, shape in self._shapes.items())

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        shape, made = self._shapes[name], (self._seed, self._device)
        if self._is_fp8(name):
            return random_fp8(name, shape, *made)
        if _is_mxfp4(name):
            scales = self._shapes[name.removesuffix(mxfp4.BLOCKS).removesuffix(mxfp4.SCALES) + mxfp4.SCALES]
            return random_mxfp4(name, shape, scales[-1] * MX_BLOCK, *made)
        if isinstance(self.config.quantization, Int4Weights) and self.config.quantization.weight_of(name):
            return random_int4(name, shape, self._inputs(name), *made)
        if (weight := scaled(name)) in self._shapes and weight is not None:
            return random_scales(name, shape, self._shapes[weight][-1], *made)
        return random_tensor(name, shape, *made, getattr(torch, self._dtype_name))

    def _inputs(self, name: str) -> int:
        """Inputs of the INT4 weight of which `name` is a part."""
        assert self.config.quantization is not None
        shape = self.config.weight_shapes()[self.config.quantization.weight_of(name) or name]
        return shape[-1]

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer or ByteTokenizer(self.config.vocab_size)

    def _is_fp8(self, name: str) -> bool:
        return any(name + suffix in self._shapes for suffix in SCALES)

    def _item(self, name: str) -> int:
        """Bytes per value."""
        if self._is_fp8(name) or _is_mxfp4(name):
            return 1
        if isinstance(self.config.quantization, Int4Weights) and self.config.quantization.weight_of(name):
            return 4 if name.endswith(INTEGERS) else 2
        return 4 if scaled(name) is not None or self._dtype_name == "float32" else 2


def _is_mxfp4(name: str) -> bool:
    return name.endswith((mxfp4.BLOCKS, mxfp4.SCALES))


__all__ = ["SHAPES", "DummyCheckpoint", "random_tensor"]
