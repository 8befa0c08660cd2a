"""`Format`, the interface of a quantization format: its config, tensors on disk, loading, random weights and memory."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from specbatch.errors import SpecbatchError

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.collectives.communicator import Communicator
    from specbatch.kernels.gemm.quantized.weight import Weight

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Modules = tuple[frozenset[str], tuple[str, ...]]  # names and patterns, see `Format`
# Never quantized: convolutions and routers. Embedding and output matrix are excluded by their names.
PLAIN = ("conv1d.weight", "conv.conv.weight", ".gate.weight", ".router.weight", "shared_expert_gate.weight")
PATTERN = "re:"  # begins a regular expression in the list of unquantized modules
_WILDCARDS = frozenset("*?[")
SCALES = ("_scale_inv", "_scale")  # how scales are called, after the name of their weight
_SCALED = (".weight", "_proj")  # how the names of such weights end
FLOATS = ("BF16", "F16", "F32")  # types of safetensors that scales have in most formats
_SMALLEST_SCALE = 1e-38  # those of a matrix are not all below it
# Activations get scales of their own as the model runs, or are not quantized.
_OF_INPUTS = (".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point")


class MatrixShape(tuple[int, ...]):
    """Shape of a weight that is read as the matrix of a GEMM, or as a part of one: a draft can have it in FP8 (see
    `Reader.in_fp8`). It equals the tuple of the same sizes; the shapes of all other weights are such tuples."""

    __slots__ = ()


class Group(NamedTuple):
    """One of the `config_groups` of compressed-tensors: its place in the config.json, itself, the whole
    quantization_config, and the modules that are not quantized."""

    where: str
    settings: dict[str, Any]
    config: dict[str, Any]
    modules: Modules


class Source(Protocol):
    """What `Format.load` reads from: the tensors of a checkpoint, of which this rank has a part."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the activations."""

    @property
    def device(self) -> torch.device: ...

    @property
    def ranks(self) -> Communicator | None:
        """Over which the model is divided; None if it is not."""

    def whole(self, name: str) -> torch.Tensor:
        """A tensor on the device."""

    def part(self, name: str, shape: Shape, *, of: str | None = None, rows: int = 1) -> torch.Tensor:
        """This rank's part of a tensor, of this shape, on the device. of: the weight to which it belongs, if it has
        another name; rows: how many outputs of that a row is for."""

    def cut(self, name: str, tensors: Iterable[tuple[torch.Tensor, Shape]]) -> list[torch.Tensor]:
        """This rank's parts, of these shapes, of whole tensors of the weight `name`, values first."""

    def require_finite(self, name: str, finite: bool, kind: object) -> None:
        """Refuse a tensor that is not; kind: its type, for the error message."""

    def unusable(self, name: str, why: str) -> SpecbatchError:
        """The error for a weight that cannot be used."""


@dataclass(frozen=True)
class Format(ABC):
    """How the weights of a checkpoint are quantized. A subclass is a format; `registry.FORMATS` has them all.

    plain: names of modules that are not quantized (see `is_quantized`); patterns: of their full names, as a regular
    expression after "re:" or with wildcards. `fit` replaces both by what the files say. inputs: the type of quantized
    activations for which the checkpoint was made; None: unquantized ones. irregular: weights that are dequantized at
    load on every device, because their inputs are scaled or in another order.
    """

    name: ClassVar[str]  # for log lines
    file_types: ClassVar[tuple[str, ...]] = ()  # of safetensors: those of weights that keep their name
    has_expert_gemm: ClassVar[bool] = True  # else experts are dequantized at load
    has_stacks: ClassVar[bool] = True  # else no tensor has all experts of a layer
    has_fp8_gemm: ClassVar[bool] = False  # whether GEMMs can take FP8 activations
    dequantizes_for_gemm: ClassVar[bool] = False  # whether GEMMs of many rows dequantize the weight first
    is_of_family: ClassVar[bool] = False  # whether only families that name its method read it (`ModelConfig.methods`)

    plain: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    inputs: str | None = None
    irregular: frozenset[str] = frozenset()

    @property
    def forms(self) -> tuple[Format, ...]:
        """The formats of the weights, of which most checkpoints have one."""
        return (self,)

    def of(self, name: str) -> Format:
        """The format of the quantized weight `name`. Raises SpecbatchError if it has none."""
        return self

    # The config.json.

    @classmethod
    @abstractmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        """By `quant_method`, what reads a quantization_config."""

    @classmethod
    def groups(cls) -> dict[tuple[str, int], Callable[[Group], Format]]:
        """By `type` and `num_bits` of the weights, what reads a group of compressed-tensors."""
        return {}

    @classmethod
    def algorithms(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        """By `quant_algo`, what reads a quantization_config of ModelOpt."""
        return {}

    # The tensors on disk.

    @property
    @abstractmethod
    def input_step(self) -> int:
        """A part of the inputs of a weight is a multiple of it."""

    @abstractmethod
    def parts(self, name: str, shape: Shape) -> Shapes:
        """The tensors of the quantized weight `name` [..., out, in], as they are stored."""

    @abstractmethod
    def weight_of(self, name: str) -> str | None:
        """The quantized weight of which `name` is the scales or another part; None if it is anything else."""

    @classmethod
    def types_of_part(cls, name: str) -> tuple[tuple[str, ...], str] | None:
        """The types of safetensors that a part of this name may have, and what an error message says of others; None if
        it is no name of a part."""
        return None

    @abstractmethod
    def types_of(self, name: str) -> tuple[str, ...] | None:
        """The types of safetensors that a tensor of a quantized weight may have in this format; None if it has no
        tensor of this name."""

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of the files is not needed, such as the scales of activations."""
        return is_input_scale(name)

    def is_idle(self, name: str, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> bool:
        """Whether a tensor that no config describes can be ignored, because it changes nothing."""
        return False

    def respelled(self, found: Shapes) -> Shapes:
        """Those of the tensors `found` that are stored in several shapes, and the one [out, 1] in which they are
        read."""
        return {}

    def for_values(self, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> Self:
        """This, with those of the tensors that are `irregular` by their presence or values."""
        return self

    def is_quantized(self, name: str, shape: Shape) -> bool:
        """Whether a weight is quantized. A plain module includes its submodules, and a name matches every module that
        ends with it."""
        if len(shape) < 2 or name.endswith(PLAIN):
            return False
        module = name.removesuffix(".weight")
        parts = module.split(".")
        starts = [".".join(parts[: place + 1]) for place in range(len(parts))]
        names = {*starts, *(".".join(parts[place:]) for place in range(len(parts)))}
        return self.plain.isdisjoint(names) and not any(matches(pattern, module) for pattern in self.patterns)

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
        return replace(self, plain=plain, patterns=())

    # Weights in memory.

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Has this device GEMMs for the format? A CPU has none: weights are dequantized once, at load. Dequantizing for
        each GEMM would read and write four times as much."""
        return device.type == "cuda"

    def keeps(self, name: str, device: torch.device) -> bool:
        """Whether the quantized weight `name` stays so on this device."""
        return self.runs_on(device) and (self.has_expert_gemm or "expert" not in name) and name not in self.irregular

    def group_memory(self, shape: Shape) -> int | None:
        """Bytes that a quantized weight takes in the groups that a CPU keeps; None if it has no such form."""
        return None

    def keeps_groups(self, name: str, device: torch.device) -> bool:
        """Whether the quantized weight `name`, which does not stay so on this device, stays in groups."""
        from specbatch.kernels.gemm.quantized.grouped import runs_on

        has_groups = self.group_memory((1, self.input_step)) is not None and name not in self.irregular
        return has_groups and runs_on(device) and "expert" not in name

    @abstractmethod
    def load(self, name: str, shape: Shape, source: Source) -> Weight:
        """This rank's part [..., out, in] of a quantized weight, on the device. Refuses damaged values and scales."""

    @abstractmethod
    def memory(self, shape: Shape) -> int:
        """Bytes that a quantized weight takes in memory, with its scales."""

    @property
    def kind(self) -> str:
        """Weights of formats with the same kind can form one matrix."""
        return self.name

    def may_dequantize(self, shape: Shape) -> bool:
        """Whether concatenating this weight with others may cut its blocks."""
        return False

    # Random weights.

    @abstractmethod
    def random(self, name: str, shape: Shape, inputs: int, generator: torch.Generator) -> torch.Tensor:
        """A random part `name` of a weight with so many inputs, on the generator's device: together the parts have the
        magnitude of `weights.dummy.random_tensor`."""

    @abstractmethod
    def random_item(self, name: str) -> int:
        """Bytes of a value of such a part."""


def scaled(name: str) -> str | None:
    """The tensor that keeps its name, of which `name` is the scales; None if it is anything else."""
    for suffix in SCALES:
        if name.endswith(tuple(end + suffix for end in _SCALED)):
            return name.removesuffix(suffix)
    return None


def scales_per_output(found: Shapes) -> Shapes:
    """Among the tensors `found`, scales per tensor or per output of a matrix, in any spelling, as [out, 1]; see
    `Format.respelled`."""
    pairs = [(name, scales, found[weight]) for name, scales in found.items() if (weight := scaled(name)) in found]
    return {
        name: (shape[0], 1)
        for name, scales, shape in pairs
        if len(shape) == 2 and scales in ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
    }


def check_scales(scales: torch.Tensor, name: str, source: Source, *, signed: bool = False) -> None:
    """Refuse scales of the weight `name` that are not finite, all zero, or negative and not `signed`. A single zero
    belongs to a group of zeros."""
    wrong = (
        "values that are not finite" if not scales.isfinite().all()
        else "only zeros" if not (scales.abs() > _SMALLEST_SCALE).any()
        else "negative values" if not signed and (scales < 0).any()
        else None
    )  # fmt: skip
    if wrong is not None:
        raise source.unusable(name, f"its scales hold {wrong}; the file is damaged")


def is_input_scale(name: str) -> bool:
    """Whether a tensor is a scale of activations."""
    return name.endswith(_OF_INPUTS)


def in_order(groups: torch.Tensor, size: int) -> bool:
    """Whether groups [inputs], of so many inputs each, are in the order of the inputs."""
    import torch

    places = torch.arange(len(groups), device=groups.device)
    return bool(groups.eq(places.div(size, rounding_mode="floor")).all())


def is_zero_bias(name: str, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> bool:
    """Whether a tensor is a bias of zeros, which old versions of AutoGPTQ write for every layer."""
    is_bias = name.endswith(".bias") and name.removesuffix(".bias") + ".qweight" in found
    return is_bias and not bool(tensor(name).any())


def is_pattern(name: str) -> bool:
    """Whether this is no name of a module, but what `matches` takes."""
    return name.startswith(PATTERN) or not _WILDCARDS.isdisjoint(name)


def matches(pattern: str, module: str) -> bool:
    """Whether a regular expression after "re:", or a name with wildcards, is that of a module."""
    return _expression(pattern).match(module) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """Tables have more of them than `re` remembers."""
    return re.compile(pattern.removeprefix(PATTERN) if pattern.startswith(PATTERN) else translate(pattern))
