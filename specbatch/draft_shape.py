"""How many tokens are drafted, and in which shape: steps, children per node, nodes kept."""

from __future__ import annotations

from itertools import product
from typing import Final, NamedTuple

from specbatch.errors import at_least, refuse

MOST = 63  # nodes behind a root: ancestors are the bits of one 64-bit word
TREE = 7  # nodes of a tree where none are given, as in SGLang's (5, 4, 8), which counts the root


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
        """KV slots from the root's on that a drafter writes which expands this tree: the root's and the beams'."""
        return 1 + (self.steps - 1) * self.topk


# Drafts by models as SGLang has them: 3 steps, top-k 1, 4 tokens with the root; NGRAM as in vLLM's examples of prompt
# lookup; DFLASH a block of 16, filled in one pass and accepted as a chain. Without drafting, what NGRAM would take.
PUBLISHED = {
    "none": DraftShape(4, 1, 4),
    "ngram": DraftShape(4, 1, 4),
    "standalone": DraftShape(3, 1, 3),
    "eagle": DraftShape(3, 1, 3),
    "eagle3": DraftShape(3, 1, 3),
    "mtp": DraftShape(3, 1, 3),
    "nextn": DraftShape(3, 1, 3),
    "dflash": DraftShape(15, 1, 15),
}
CHAINS = ("dflash",)  # which draft no trees
AUTO: Final = "auto"  # as draft_tokens: between none and all of a chain, whatever is fastest


def shape_of(algorithm: str, steps: int | None, topk: int | None, tokens: int | None) -> DraftShape:
    """Fill in what is None, refuse what is impossible.

    Nothing given: the published shape. A chain's steps are its tokens. A tree takes the published steps and `TREE`
    nodes, as far as they go together with what is given.
    """
    for setting, value in (("draft_steps", steps), ("draft_topk", topk), ("draft_tokens", tokens)):
        if value is not None:
            at_least(setting, value, 1)
            if value > MOST:
                raise refuse(setting, value, f"use at most {MOST} (a verify has at most {MOST + 1} rows)")
    if algorithm in CHAINS and (topk or 1) > 1:
        raise refuse("draft_topk", topk, f"{algorithm!r} drafts chains only; use 1")
    published = PUBLISHED[algorithm]
    if (steps, topk, tokens) == (None, None, None):
        return published
    if (topk or 1) == 1:
        shape = DraftShape(steps or tokens or published.steps, 1, tokens or steps or published.steps)
    else:
        shape = DraftShape(steps or min(published.steps, tokens or MOST), topk or 1, tokens or 1)
        if tokens is None:
            shape = shape._replace(tokens=min(max(TREE, shape.steps), _pool(algorithm, shape)))
    wrong = _wrong(algorithm, shape)
    if wrong:
        setting, reason = wrong
        near = _nearest(algorithm, shape)
        works = f"use draft_steps={near.steps}, draft_topk={near.topk}, draft_tokens={near.tokens}"
        raise refuse(f"draft_{setting}", getattr(shape, setting), f"{reason} (the root is not counted); {works}")
    return shape


def lengths_of(most: int) -> tuple[int, ...]:
    """How many drafts AUTO chooses from: 0, powers of two, and the most."""
    powers = (1 << power for power in range(most.bit_length()))
    return (0, *(length for length in powers if length < most), most)


def _pool(algorithm: str, shape: DraftShape) -> int:
    """Nodes to choose from. NGRAM merges `topk` texts of `steps` tokens; others give each of `topk` beams of a step
    `topk` children."""
    steps, topk, _ = shape
    return steps * topk if algorithm == "ngram" else topk + (steps - 1) * topk * topk


def _wrong(algorithm: str, shape: DraftShape) -> tuple[str, str] | None:
    """Which of the three is impossible beside the others, and why."""
    steps, topk, tokens = shape
    if topk == 1 and steps != tokens:
        return "steps", f"a chain of draft_tokens={tokens} takes as many steps"
    if steps > tokens:
        return "steps", f"a tree of draft_tokens={tokens} is no deeper than that"
    pool = _pool(algorithm, shape)
    if tokens > pool:
        return "tokens", f"draft_steps={steps} and draft_topk={topk} make {pool} candidates"
    if algorithm != "ngram" and shape.draft_slots > MOST + 1:
        return "topk", f"draft_steps={steps} would run {shape.draft_slots - 1} nodes, and {MOST} is the most"
    return None


def _nearest(algorithm: str, asked: DraftShape) -> DraftShape:
    """The possible shape that differs by the least sum; rather in tokens than in steps than in topk."""

    def distance(shape: DraftShape) -> tuple[int, int, int]:
        steps, topk, tokens = (abs(one - other) for one, other in zip(shape, asked, strict=True))
        return steps + topk + tokens, topk, steps

    numbers = range(1, MOST + 1)
    shapes = (DraftShape(*three) for three in product(numbers, range(1, min(asked.topk + 1, MOST) + 1), numbers))
    return min((shape for shape in shapes if not _wrong(algorithm, shape)), key=distance)
