"""Settings of a training run: every choice that the weights depend on, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specbatch.algorithms import ALGORITHMS
from specbatch.errors import at_least, refuse

HEADS = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.training)
_OWN: dict[str, dict[str, int | None]] = {  # settings of one algorithm, with defaults; None: depends on the target
    "eagle3": {"unroll": 5, "vocab": None},
    "mtp": {"unroll": 5},
    "dflash": {"draft_layers": 2, "block_size": 8},
}
ANSWER_TOKENS = 512  # default limit of an answer
USUAL_VOCABULARY = 32000  # draft vocabulary of published EAGLE-3 heads


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run. Those of other algorithms are None.

    algorithm     "eagle3", "dflash" or "mtp"
    steps         updates
    batch_tokens  tokens of a batch, padding included
    max_len       longest example in tokens; longer ones are truncated
    lr            peak learning rate, after a short warm-up and before a cosine decay to a tenth
    held_out      answers that are not trained on but used for evaluation
    unroll        eagle3, mtp: number of consecutive drafts that the head learns
    vocab         eagle3: size of the draft vocabulary, the most frequent tokens; default 32000, or all of the target's
    draft_layers  dflash: number of layers
    block_size    dflash: tokens of a block, including the anchor
    """

    algorithm: str = "eagle3"
    steps: int = 1000
    batch_tokens: int = 4096
    max_len: int = 1024
    lr: float = 5e-4
    held_out: int = 32
    seed: int = 0
    unroll: int | None = None
    vocab: int | None = None
    draft_layers: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in HEADS:
            raise refuse("algorithm", self.algorithm, f"heads that can be trained are {', '.join(HEADS)}")
        for name, least in (("steps", 1), ("max_len", 8), ("batch_tokens", 8), ("held_out", 1), ("seed", 0)):
            at_least(name, getattr(self, name), least)
        if self.batch_tokens < self.max_len:
            works = f"use at least max_len={self.max_len}, or lower that: an example is never split"
            raise refuse("batch_tokens", self.batch_tokens, works)
        if isinstance(self.lr, bool) or not isinstance(self.lr, (int, float)) or not 0 < self.lr < 1:
            raise refuse("lr", self.lr, "use a number above 0 and below 1")
        self._own_settings()

    def _own_settings(self) -> None:
        own = _OWN[self.algorithm]
        for name in {name for names in _OWN.values() for name in names}:
            value = getattr(self, name)
            if value is None and name in own:
                object.__setattr__(self, name, own[name])
            elif value is not None and name not in own:
                takers = ", ".join(algorithm for algorithm, names in _OWN.items() if name in names)
                raise refuse(name, value, f"algorithm {self.algorithm!r} has no such setting; it belongs to {takers}")
        limits = {"unroll": (1, 16), "draft_layers": (1, 64), "block_size": (2, 64)}
        for name in own.keys() & limits.keys():
            low, high = limits[name]
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise refuse(name, value, f"use {low} to {high}")
        if self.vocab is not None:
            at_least("vocab", self.vocab, 1)

    def vocabulary(self, target: int) -> int:
        """Draft vocabulary size of an EAGLE-3 head for a target with that many tokens."""
        if self.vocab is not None and self.vocab > target:
            raise refuse("vocab", self.vocab, f"the target has {target} tokens; use at most that")
        return self.vocab or min(USUAL_VOCABULARY, target)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}
