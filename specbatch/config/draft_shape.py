"""The shape of a draft: steps, children per node, and tokens."""

from __future__ import annotations

from itertools import product
from typing import Final, NamedTuple

from specbatch.algorithms import ALGORITHMS, Algorithm
from specbatch.errors import at_least, refuse

MOST = 63  # nodes after a root: ancestors are the bits of one 64-bit word
TREE = 7  # default nodes of a tree, as in SGLang's (5, 4, 8), which counts the root


class DraftShape(NamedTuple):
    """Draft passes, children per expanded node (1: a chain), and drafted nodes, the root not counted."""

    steps: int
    topk: int
    tokens: int

    def __str__(self) -> str:
        tree = f" as a tree ({self.steps} steps, top {self.topk})" if self.topk > 1 else ""
        return f"{self.tokens} drafted{tree}"

    @property
    def draft_slots(self) -> int:
        """KV slots, from the root's on, that a drafter writes to when it expands this tree: those of root and beams."""
        return 1 + (self.steps - 1) * self.topk


AUTO: Final = "auto"  # for draft_tokens: the fastest number from 0 to the whole chain; for verify_budget: of rows
QUARTERS = 4  # chosen budgets are whole quarters of a draft per request


def counts_root(steps: int | None, topk: int | None, tokens: int | str | None) -> bool:
    """Whether the settings of a chain are SGLang's, whose number of tokens includes the root: 3 steps, 4 tokens."""
    return (topk or 1) == 1 and steps is not None and tokens == steps + 1


def shape_of(name: str, steps: int | None, topk: int | None, tokens: int | None) -> DraftShape:
    """Complete the draft shape of the algorithm `name` from the settings that are given (not None).

    Without any, a chain of the algorithm's `default_tokens`. A chain has as many steps as tokens. A tree has by default
    `default_tokens` steps and `TREE` nodes, adjusted to the given settings. Raises SpecbatchError for an impossible
    combination and names the nearest possible one. A chain as SGLang writes it (`counts_root`) is understood.
    """
    algorithm = ALGORITHMS[name]
    for setting, value in (("draft_steps", steps), ("draft_topk", topk), ("draft_tokens", tokens)):
        if value is not None:
            at_least(setting, value, 1)
            if value > MOST:
                raise refuse(setting, value, f"use at most {MOST} (a verify has at most {MOST + 1} tokens)")
    if counts_root(steps, topk, tokens):
        tokens = steps
    if algorithm.tree is None and (topk or 1) > 1:
        raise refuse("draft_topk", topk, f"{name!r} drafts chains only; use 1")
    default = algorithm.default_tokens
    if (topk or 1) == 1:
        shape = DraftShape(steps or tokens or default, 1, tokens or steps or default)
    else:
        shape = DraftShape(steps or min(default, tokens or MOST), topk or 1, tokens or 1)
        if tokens is None:
            candidates = algorithm.candidates(shape.steps, shape.topk)
            shape = shape._replace(tokens=min(max(TREE, shape.steps), candidates))
    wrong = _wrong(algorithm, shape)
    if wrong:
        setting, reason = wrong
        near = _nearest(algorithm, shape)
        works = f"use draft_steps={near.steps}, draft_topk={near.topk}, draft_tokens={near.tokens}"
        raise refuse(f"draft_{setting}", getattr(shape, setting), f"{reason} (the root is not counted); {works}")
    return shape


def auto_draft_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts that AUTO chooses from: 0, powers of two, and `most`."""
    powers = (1 << power for power in range(most.bit_length()))
    return (0, *(length for length in powers if length < most), most)


def auto_budgets(most: int) -> tuple[float, ...]:
    """Rows per request that a verify of up to `most` drafts may have if AUTO chooses them: the newest token, and drafts
    from a quarter to all, each number at most twice the one before."""
    counts = {first << power for first in (1, 3) for power in range(most.bit_length() + 2)}
    return tuple(1 + count / QUARTERS for count in sorted({*counts, QUARTERS * most}) if count <= QUARTERS * most)


def _wrong(algorithm: Algorithm, shape: DraftShape) -> tuple[str, str] | None:
    """The setting that contradicts the others, and why; None if the shape is possible."""
    steps, topk, tokens = shape
    if topk == 1 and steps != tokens:
        return "steps", f"a chain of draft_tokens={tokens} takes as many steps"
    if steps > tokens:
        return "steps", f"a tree of draft_tokens={tokens} is no deeper than that"
    candidates = algorithm.candidates(steps, topk)
    if tokens > candidates:
        return "tokens", f"draft_steps={steps} and draft_topk={topk} make {candidates} candidates"
    if algorithm.tree == "expanded" and shape.draft_slots > MOST + 1:
        return "topk", f"draft_steps={steps} would run {shape.draft_slots - 1} nodes, and {MOST} is the most"
    return None


def _nearest(algorithm: Algorithm, asked: DraftShape) -> DraftShape:
    """The possible shape with the least total difference; ties prefer to change tokens, then steps, then topk."""

    def distance(shape: DraftShape) -> tuple[int, int, int]:
        steps, topk, tokens = (abs(one - other) for one, other in zip(shape, asked, strict=True))
        return steps + topk + tokens, topk, steps

    numbers = range(1, MOST + 1)
    shapes = (DraftShape(*three) for three in product(numbers, range(1, min(asked.topk + 1, MOST) + 1), numbers))
    return min((shape for shape in shapes if not _wrong(algorithm, shape)), key=distance)
