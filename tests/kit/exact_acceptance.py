"""Exact losslessness of acceptance rules: distributions with small denominators, and random numbers from a lattice."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.step_input import Proposal
from specbatch.engine.device import acceptance
from specbatch.engine.device.acceptance import RefResult

Text = tuple[int, ...]
Rule = Callable[[torch.Tensor, Proposal, torch.Tensor, Any], RefResult]


def sampling_of(rows: int, temperature: Any = 1.0, **changes: Any) -> Sampling:
    """Parameters of `rows` requests, seeds counting up; a list or tensor gives one value per request."""
    values = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    tensors = {name: torch.as_tensor(values[name]).expand(rows) for name in ("temperature", "top_k", "top_p", "min_p")}
    return Sampling(
        **tensors,
        seeds=torch.as_tensor(values.get("seeds", torch.arange(rows))),
        flags=SamplingFlags(
            sampled=bool((tensors["temperature"] > 0).any()),
            truncated=bool(((tensors["top_k"] > 0) | (tensors["top_p"] < 1) | (tensors["min_p"] > 0)).any()),
            logprobs=values.get("logprobs", False),
        ),
    )


def mutant(module: ModuleType, old: str, new: str) -> Rule:
    """`accept_ref` with one expression of its module, or of the tree walk's module, replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} does not contain {old!r} once: update this mutant"
    changed: dict[str, Any] = {"__name__": "mutant"}
    exec(source.replace(old, new), changed)
    if module is not acceptance:
        walk = changed["walk_tree_ref"]
        exec(inspect.getsource(acceptance), changed)
        changed["walk_tree_ref"] = walk
    rule: Rule = changed["accept_ref"]
    return rule


@dataclass(frozen=True)
class Lattice(Sampling):
    """Uses logits as probabilities, and takes its random numbers from `grid[stream]` [B, positions from 1], whatever
    the root of the verify is."""

    grid: dict[int, torch.Tensor]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def uniform(self, positions: torch.Tensor, stream: int) -> torch.Tensor:
        return self.grid[stream].gather(1, (positions & 0xFFFFFFFF) - 1)


def lattice_of(grid: dict[int, torch.Tensor]) -> Lattice:
    plain = sampling_of(1)
    return Lattice(**{name: getattr(plain, name) for name in plain.__dataclass_fields__}, grid=grid)


@dataclass(frozen=True)
class Toy:
    """A target and a draft whose probabilities are multiples of 1 / units and differ after every prefix.

    Every threshold and every partial sum that a rule can meet is then a fraction with a denominator up to `units`:
    the midpoints of a lattice of lcm(1..units) cells represent all random numbers, and counting them integrates
    exactly.
    """

    seed: int
    vocabulary: int
    units: int

    def target(self, prefix: Text) -> list[float]:
        return _random_distribution(self, "target", prefix)

    def draft(self, prefix: Text) -> list[float]:
        """Equals the target's after every fourth prefix."""
        agrees = random.Random(f"{self.seed} {prefix}").random() < 0.25
        return _random_distribution(self, "target" if agrees else "draft", prefix)

    def probability(self, text: Text, start: int = 0) -> float:
        """Of the tokens from `start` on, under the target."""
        return math.prod(self.target(text[:place])[text[place]] for place in range(start, len(text)))

    def numbers(self, width: int) -> torch.Tensor:
        """All combinations of `width` random numbers: float64 [cells ** width, width]."""
        cells = math.lcm(*range(1, self.units + 1))
        midpoints = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        return torch.cartesian_prod(*[midpoints] * width).view(-1, width)

    def emitted(self, result: RefResult) -> dict[Text, float]:
        """How often each text is emitted: the accepted drafts and the token after them."""
        rows, width = result.tokens.shape
        base = self.vocabulary + 1
        digits = torch.where(torch.arange(width) > result.accepted[:, None], 0, result.tokens + 1)
        counts = (digits * base ** torch.arange(width)).sum(-1).bincount()
        return {
            tuple(digit - 1 for place in range(width) if (digit := code // base**place % base)): share / rows
            for code, share in enumerate(counts.tolist())
            if share
        }

    def error(self, emitted: dict[Text, float], length: int) -> float:
        """Largest difference to the target's distribution of `length` tokens, when what is emitted is continued by
        plain sampling."""
        if max(map(len, emitted)) > length:
            return 1.0
        whole: dict[Text, float] = defaultdict(float)
        for run, chance in emitted.items():
            for rest in itertools.product(range(self.vocabulary), repeat=length - len(run)):
                whole[run + rest] += chance * self.probability(run + rest, len(run))
        texts = itertools.product(range(self.vocabulary), repeat=length)
        return max(abs(whole[text] - self.probability(text)) for text in texts)


@cache
def _random_distribution(toy: Toy, kind: str, prefix: Text) -> list[float]:
    randomness = random.Random(f"{toy.seed} {kind} {prefix}")
    drawn = [randomness.randrange(toy.vocabulary) for _ in range(toy.units)]
    return [drawn.count(token) / toy.units for token in range(toy.vocabulary)]
