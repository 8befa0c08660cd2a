"""Checkpoints whose layers are quantized in several formats: a table says which layer has which.

* ModelOpt, `quant_algo` MIXED_PRECISION: `quantized_layers` has the `quant_algo` and the size of groups of each module.
  It is in hf_quant_config.json, and in newer files in config.json, too. NVIDIA/TensorRT-Model-Optimizer,
  `export/quant_utils.py`
* compressed-tensors: several `config_groups`, whose `targets` are names of modules, regular expressions after "re:", or
  classes of modules; names count before classes. vllm-project/compressed-tensors, `match_targets`
* GPTQ, AWQ and auto-round: `gptq`. AMD Quark: `quark`

Each weight is stored, loaded and multiplied as its own format has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from specbatch.errors import refuse
from specbatch.models.formats.format import Format, Shape, Shapes, Source, is_pattern, matches

if TYPE_CHECKING:
    import torch

    from specbatch.kernels.gemm.quantized.weight import Weight

CLASSES = ("Linear",)  # of modules that have weights


@dataclass(frozen=True)
class MixedWeights(Format):
    """members: the formats, with the same modules that are not quantized; targets: names of modules, patterns and
    classes, of each its member, in the order of the config: the first pattern that fits counts. known: members of
    modules that were compared with the patterns, which a table of an entry per module has by the thousand."""

    name: ClassVar[str] = "mixed"
    has_stacks: ClassVar[bool] = False  # experts may have formats of their own

    members: tuple[Format, ...] = ()
    targets: tuple[tuple[str, int], ...] = ()
    known: dict[str, int | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_targets(cls, found: Sequence[tuple[Format, Sequence[str]]]) -> Format:
        """A format for formats and the modules that have them: the only one, or several."""
        members = list(dict.fromkeys(form for form, _ in found))
        if len(members) == 1:
            return members[0]
        targets = tuple((name, members.index(form)) for form, names in found for name in names)
        return cls(members[0].plain, members[0].patterns, members=tuple(members), targets=targets)

    @classmethod
    def methods(cls) -> dict[str, Callable[[dict[str, Any]], Format]]:
        return {}

    @property
    def forms(self) -> tuple[Format, ...]:
        return self.members

    def of(self, name: str) -> Format:
        found = self._member(name)
        if found is None:
            works = f"{name} has scales, and the config has no format for it; add its layer, or use unquantized weights"
            raise refuse("quantization_config", "mixed", works)
        return self.members[found]

    def _member(self, name: str) -> int | None:
        """The format of a weight, or of its module: by name, that of a module around it, pattern or class."""
        by_name, patterns, rest = self._places
        parts = name.removesuffix(".weight").split(".")
        for end in range(len(parts), 0, -1):
            if (found := by_name.get(".".join(parts[:end]))) is not None:
                return found
        module = ".".join(parts)
        if module not in self.known:
            self.known[module] = next((place for pattern, place in patterns if matches(pattern, module)), rest)
        return self.known[module]

    @cached_property
    def _places(self) -> tuple[dict[str, int], list[tuple[str, int]], int | None]:
        """The format by the name of a module, by pattern, and that of all others."""
        patterns = [pair for pair in self.targets if is_pattern(pair[0])]
        rest = next((place for target, place in self.targets if target in CLASSES), None)
        return dict(self.targets), patterns, rest

    def _own(self, found: Shapes, place: int) -> Shapes:
        """Those of the tensors that belong to weights of one format."""
        return {name: shape for name, shape in found.items() if self._member(self.weight_of(name) or name) == place}

    @property
    def input_step(self) -> int:
        return math.lcm(*(form.input_step for form in self.members))

    def parts(self, name: str, shape: Shape) -> Shapes:
        return self.of(name).parts(name, shape)

    def weight_of(self, name: str) -> str | None:
        found = [(place, form.weight_of(name)) for place, form in enumerate(self.members)]
        own = (weight for place, weight in found if weight is not None and self._member(weight) in (place, None))
        return next(own, None)

    def types_of(self, name: str) -> tuple[str, ...] | None:
        weight = self.weight_of(name) or name
        return None if self._member(weight) is None else self.of(weight).types_of(name)

    def is_unused(self, name: str) -> bool:
        weight = self.weight_of(name)
        members = self.members if weight is None else (self.of(weight),)
        return any(form.is_unused(name) for form in members)

    def is_idle(self, name: str, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> bool:
        return any(form.is_idle(name, found, tensor) for form in self.members)

    def respelled(self, found: Shapes) -> Shapes:
        every: Shapes = {}
        for place, form in enumerate(self.members):
            every |= form.respelled(self._own(found, place))
        return every

    def for_values(self, found: Shapes, tensor: Callable[[str], torch.Tensor]) -> Self:
        members = (form.for_values(self._own(found, place), tensor) for place, form in enumerate(self.members))
        return replace(self, members=tuple(members))

    def is_quantized(self, name: str, shape: Shape) -> bool:
        return super().is_quantized(name, shape) and self._member(name) is not None

    def fit(self, found: Shapes) -> Self:
        for weight in {self.weight_of(name) for name in found} - {None}:
            self.of(str(weight))
        members = (form.fit(self._own(found, place)) for place, form in enumerate(self.members))
        return replace(super().fit(found), members=tuple(members))

    def keeps(self, name: str, device: torch.device) -> bool:
        return self.of(name).keeps(name, device)

    def keeps_groups(self, name: str, device: torch.device) -> bool:
        return self.of(name).keeps_groups(name, device)

    def load(self, name: str, shape: Shape, source: Source) -> Weight:
        return self.of(name).load(name, shape, source)

    def memory(self, shape: Shape) -> int:
        raise NotImplementedError("of each format")

    def random(self, name: str, shape: Shape, inputs: int, generator: torch.Generator) -> torch.Tensor:
        return self.of(self.weight_of(name) or name).random(name, shape, inputs, generator)

    def random_item(self, name: str) -> int:
        return self.of(self.weight_of(name) or name).random_item(name)
