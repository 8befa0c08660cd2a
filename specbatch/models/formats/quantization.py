"""How the quantized weights of a checkpoint are stored: the tensors on disk, their bytes, which modules have none."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Self

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
# Never quantized: convolutions and routers. Embedding and output matrix are excluded by their names.
PLAIN = ("conv1d.weight", "conv.conv.weight", ".gate.weight", ".router.weight", "shared_expert_gate.weight")
PATTERN = "re:"  # begins a regular expression in the list of unquantized modules
# Scales of activations, which are quantized with scales of their own as the model runs, and of an FP8 KV cache.
_OF_INPUTS = (".input_scale", ".activation_scale")
_OF_CACHE = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale")


class MatrixShape(tuple[int, ...]):
    """Shape of a weight that is read as the matrix of a GEMM, or as a part of one: a draft can have it in FP8 (see
    `layers.Reader.in_fp8`). It equals the tuple of the same sizes; the shapes of all other weights are such tuples."""

    __slots__ = ()


@dataclass(frozen=True)
class Quantization(ABC):
    """plain: names of modules that are not quantized (see `is_quantized`); patterns: of their full names, as a regular
    expression after "re:" or with wildcards. `fit` replaces both by what the files say. has_cache_scales: the files
    have scales for an FP8 KV cache."""

    plain: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    has_cache_scales: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """For log lines."""

    @property
    @abstractmethod
    def input_step(self) -> int:
        """A part of the inputs of a weight is a multiple of it."""

    @abstractmethod
    def parts(self, name: str, shape: Shape) -> Shapes:
        """The tensors of the quantized weight `name` [..., out, in], as they are stored."""

    @abstractmethod
    def memory(self, shape: Shape) -> int:
        """Bytes that a quantized weight takes in memory, with its scales."""

    @abstractmethod
    def may_dequantize(self, shape: Shape) -> bool:
        """Whether concatenating this weight with others may cut its blocks."""

    @abstractmethod
    def weight_of(self, name: str) -> str | None:
        """The quantized weight of which `name` is the scales; None if it is anything else."""

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of the files is not needed, such as the scales of activations."""
        return is_unused_scale(name)

    def is_quantized(self, name: str, shape: Shape) -> bool:
        """Whether a weight is quantized. A plain module includes its submodules, and a name matches every module that
        ends with it."""
        if len(shape) < 2 or name.endswith(PLAIN):
            return False
        module = name.removesuffix(".weight")
        parts = module.split(".")
        starts = [".".join(parts[: place + 1]) for place in range(len(parts))]
        names = {*starts, *(".".join(parts[place:]) for place in range(len(parts)))}
        return self.plain.isdisjoint(names) and not any(_matches(pattern, module) for pattern in self.patterns)

    def except_for(self, modules: frozenset[str]) -> Self:
        """This, without these modules."""
        return replace(self, plain=self.plain | modules)

    def stored(self, shapes: Shapes, ends: frozenset[str]) -> Shapes:
        """`shapes` of the weights of a model as those of the tensors on disk. ends: modules that are never
        quantized."""
        found: Shapes = {}
        within = self.except_for(ends)
        for name, shape in shapes.items():
            found |= self.parts(name, shape) if within.is_quantized(name, shape) else {name: shape}
        return found

    def fit(self, found: Shapes) -> Self:
        """This, with the modules among the tensors `found` (name -> shape) that have no scales as `plain` ones."""
        scaled = {self.weight_of(name) for name in found}
        matrices = (name for name, shape in found.items() if len(shape) > 1 and self.weight_of(name) is None)
        plain = frozenset(name.removesuffix(".weight") for name in matrices if name not in scaled)
        return replace(self, plain=plain, patterns=(), has_cache_scales=any(map(is_cache_scale, found)))


def is_unused_scale(name: str) -> bool:
    """Whether a tensor is a scale that nothing here uses."""
    return name.endswith(_OF_INPUTS) or is_cache_scale(name)


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of an FP8 KV cache."""
    return name.endswith(_OF_CACHE)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith(PATTERN):
        return re.match(pattern.removeprefix(PATTERN), module) is not None
    return fnmatchcase(module, pattern)
