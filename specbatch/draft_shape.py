"""How many tokens are drafted, and in which shape: steps, children per node, nodes kept."""

from __future__ import annotations

from typing import NamedTuple

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
CHAINS = ("eagle", "eagle3", "mtp", "nextn", "dflash")  # which draft no trees


def shape_of(algorithm: str, steps: int | None, topk: int | None, tokens: int | None) -> DraftShape:
    """Fill in what is None, refuse what is impossible.

    Nothing given: the published shape. A chain's steps are its tokens. A tree takes the published steps and `TREE`
    nodes, as far as they go together with what is given.
    """
    for setting, value in (("draft_steps", steps), ("draft_topk", topk), ("draft_tokens", tokens)):
        if value is not None:
            at_least(setting, value, 1)
    if tokens is not None and tokens > MOST:
        raise refuse("draft_tokens", tokens, f"use at most {MOST} (a verify has at most {MOST + 1} rows)")
    published = PUBLISHED[algorithm]
    if (steps, topk, tokens) == (None, None, None):
        return published
    if (topk or 1) == 1:
        return _chain(steps or tokens or published.steps, tokens or steps or published.steps)
    assert topk is not None
    if algorithm in CHAINS:
        raise refuse("draft_topk", topk, f"{algorithm!r} drafts chains only; use 1")
    shape = DraftShape(steps or min(published.steps, tokens or MOST), topk, 0)
    pool = _pool(algorithm, shape)
    shape = shape._replace(tokens=tokens or min(max(TREE, shape.steps), pool))
    _check_tree(algorithm, shape, pool)
    return shape


def _chain(steps: int, tokens: int) -> DraftShape:
    if steps > MOST:
        raise refuse("draft_steps", steps, f"use at most {MOST} (a verify has at most {MOST + 1} rows)")
    if steps != tokens:
        raise refuse(
            "draft_steps",
            steps,
            f"a chain of draft_tokens={tokens} takes draft_steps={tokens} (the root is not counted); leave one of them "
            "out, or ask for a tree by a draft_topk above 1",
        )
    return DraftShape(steps, 1, tokens)


def _check_tree(algorithm: str, shape: DraftShape, pool: int) -> None:
    steps, topk, tokens = shape
    if steps > tokens:
        raise refuse(
            "draft_steps",
            steps,
            f"a tree of draft_tokens={tokens} nodes is no deeper than that; use draft_steps={tokens}, or "
            f"draft_tokens={steps}",
        )
    if tokens > pool:
        raise refuse(
            "draft_tokens",
            tokens,
            f"draft_steps={steps} and draft_topk={topk} make {pool} candidates; use draft_tokens={pool}, or more steps",
        )
    if algorithm != "ngram" and shape.draft_slots > MOST + 1:
        fewer = MOST // (steps - 1)
        raise refuse(
            "draft_topk",
            topk,
            f"draft_steps={steps} would run {(steps - 1) * topk} nodes of {MOST} at most; use draft_topk={fewer}, or "
            f"draft_steps={MOST // topk + 1}",
        )


def _pool(algorithm: str, shape: DraftShape) -> int:
    """Nodes to choose from. NGRAM merges `topk` texts of `steps` tokens; others give each of `topk` beams of a step
    `topk` children."""
    steps, topk, _ = shape
    return steps * topk if algorithm == "ngram" else topk + (steps - 1) * topk * topk
