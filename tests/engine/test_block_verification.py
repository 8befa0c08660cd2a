"""Block verification is lossless and accepts as much as its paper states: enumeration of drafts and decisions.

Its thresholds are no fractions with small denominators. Each random number is therefore taken just below and just above
the threshold that the formulas of the paper give, and weighted with the chance of that side.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import pytest
import torch
from crossed import first_quick
from exact_acceptance import Rule, Text, Toy, lattice_of, mutant

from specbatch.core.step_input import Proposal
from specbatch.engine.device import acceptance
from specbatch.engine.device.acceptance import accept_ref
from specbatch.kernels.sampling.rng import ACCEPT, RESIDUAL

BESIDE = 1e-9
by_block = partial(accept_ref, verification="block")


class Decisions(NamedTuple):
    """Of one chain of drafts: the scales a_0 .. a_g, the thresholds h_1 .. h_g, and the distribution of the next token
    after each prefix."""

    scales: list[float]
    thresholds: list[float]
    after: list[list[float]]


def decisions(toy: Toy, drafts: Text) -> Decisions:
    """Algorithm 2 of Sun et al. 2024, for one chain."""
    scales, thresholds, after = [1.0], [], []
    for place in range(len(drafts) + 1):
        p, q = toy.target(drafts[:place]), [0.0] * toy.vocabulary
        if place < len(drafts):
            q = toy.draft(drafts[:place])
        left = [max(scales[-1] * x - y, 0.0) for x, y in zip(p, q, strict=True)]
        total = sum(left)
        if place:
            whole = total + 1 - scales[-1]
            thresholds.append(scales[-1] if place == len(drafts) else total / whole if whole > 0 else 1.0)
        after.append([x / total for x in left] if total > 0 else p)
        if place < len(drafts):
            scales.append(min(scales[-1] * p[drafts[place]] / q[drafts[place]], 1.0))
    return Decisions(scales, thresholds, after)


def sides(distribution: list[float]) -> list[tuple[float, float]]:
    """Random numbers at both ends of each token's interval, for sampling by inversion, and their weights."""
    ends = [0.0, *itertools.accumulate(distribution)]
    return [
        (number, chance / 2)
        for chance, (low, high) in zip(distribution, itertools.pairwise(ends), strict=True)
        for number in (low + BESIDE, min(high, 1.0) - BESIDE)
    ]


def emitted(toy: Toy, rule: Rule, drafts: Text, count: int) -> dict[Text, float]:
    """Probability of each emitted text for one chain, of which the drafts after the first `len(drafts)` of `count` are
    ignored."""
    known = decisions(toy, drafts)
    chances = [((h - BESIDE, h), (h + BESIDE, 1 - h)) for h in known.thresholds]
    samples = [sides(distribution) for distribution in known.after]
    accepts, residuals, weights = [], [], []
    for chosen in itertools.product(*([side for side in pair if side[1] > BESIDE] for pair in chances)):
        for index in range(2 * toy.vocabulary):
            accepts.append([number for number, _ in chosen] + [0.0] * (count + 1 - len(drafts)))
            residuals.append([each[index][0] for each in samples] + [0.0] * (count - len(drafts)))
            weights.append(math.prod(weight for _, weight in chosen))
    rows, chain = len(weights), drafts + (0,) * (count - len(drafts))
    p = torch.tensor([toy.target(chain[:place]) for place in range(count + 1)], dtype=torch.float64)
    q = torch.tensor([toy.draft(chain[:place]) for place in range(count)], dtype=torch.float64)
    numbers = {
        ACCEPT: torch.tensor(accepts, dtype=torch.float64),
        RESIDUAL: torch.tensor(residuals, dtype=torch.float64),
    }
    proposal = Proposal(
        torch.tensor([chain] * rows).view(rows, count), torch.full((rows,), len(drafts)), q.expand(rows, -1, -1)
    )
    positions = torch.arange(1, count + 2).expand(rows, -1)
    result = rule(p.expand(rows, -1, -1), proposal, positions, lattice_of(numbers))
    found: dict[Text, float] = defaultdict(float)
    for row, (length, tokens) in enumerate(zip(result.accepted.tolist(), result.tokens.tolist(), strict=True)):
        index = row % (2 * toy.vocabulary)
        sample = samples[length][index][1] if length <= len(drafts) else 0.5 / toy.vocabulary  # of a wrong rule
        if (weight := weights[row] * sample) > 0:
            found[tuple(tokens[: length + 1])] += weight
    return found


def verified(toy: Toy, rule: Rule, count: int, drafted: int) -> tuple[dict[Text, float], float]:
    """Probability of each emitted text over all drafts, and the mean of accepted drafts by the paper's theorem."""
    whole: dict[Text, float] = defaultdict(float)
    mean = 0.0
    for drafts in itertools.product(range(toy.vocabulary), repeat=drafted):
        if chance := math.prod(toy.draft(drafts[:place])[token] for place, token in enumerate(drafts)):
            mean += chance * sum(decisions(toy, drafts).scales[1:])
            for text, share in emitted(toy, rule, drafts, count).items():
                whole[text] += chance * share
    return whole, mean


def accepted_by_token(toy: Toy, drafted: int) -> float:
    """Mean of accepted drafts by token verification."""
    mean = 0.0
    for drafts in itertools.product(range(toy.vocabulary), repeat=drafted):
        stays = 1.0
        for place, token in enumerate(drafts):
            stays *= min(toy.target(drafts[:place])[token], toy.draft(drafts[:place])[token])
            others = toy.vocabulary ** (drafted - place - 1)
            mean += stays / others
    return mean


def mean_of(texts: dict[Text, float]) -> float:
    return sum(share * (len(text) - 1) for text, share in texts.items())


class Example(Toy):
    """Section 2 of the paper: both models ignore the context."""

    def target(self, prefix: Text) -> list[float]:
        return [1 / 3, 2 / 3]

    def draft(self, prefix: Text) -> list[float]:
        return [2 / 3, 1 / 3]


@pytest.mark.parametrize(
    ("toy", "count"),
    first_quick(
        3, [(Toy(0, 3, 9), 3), (Toy(1, 3, 9), 3), (Toy(1, 5, 9), 2), *((Toy(n, 4, 12), 3) for n in (0, 1, 3, 4, 5))]
    ),
    ids=str,
)
def test_lossless_and_never_fewer_than_by_token(toy: Toy, count: int) -> None:
    for drafted in range(count + 1):
        texts, mean = verified(toy, by_block, count, drafted)
        assert toy.error(texts, count + 1) < 1e-12, f"{drafted} drafted"
        assert mean_of(texts) == pytest.approx(mean)
        assert mean >= accepted_by_token(toy, drafted) - 1e-12
    assert mean > accepted_by_token(toy, count) + 0.01


def test_example_of_the_paper() -> None:
    texts, _ = verified(Example(0, 2, 3), by_block, 2, 2)
    assert mean_of(texts) == pytest.approx(11 / 9)
    assert accepted_by_token(Example(0, 2, 3), 2) == pytest.approx(10 / 9)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.where(scaled < q[:, place], scaled / q[:, place], 1.0)", "scaled / q[:, place]"),
        ("scaled = scales[-1] * p[:, place]", "scaled = p[:, place]"),
        ("(scales[..., None] * p - q_next)", "(p - q_next)"),
        ("scale, left[:, 1:])", "scale, left[:, :-1])"),
        ("u * whole < left", "u < scale"),
        ("torch.where(accepts, place, 0).amax(-1)", "accepts.long().cumprod(-1).sum(-1)"),
        ("(place <= drafted[:, None])", "(place > 0)"),
        (
            "torch.where(is_drafted[..., None], torch.cat([q, torch.zeros_like(q[:, :1])], 1), 0.0)",
            "torch.cat([q, q[:, :1]], 1)",
        ),
    ],
    ids=[
        "scales not capped",
        "scale of one draft",
        "residual not scaled",
        "sums of the prefix before",
        "accepted by the scale",
        "shortest prefix",
        "drafted ignored",
        "subtracted after the last draft",
    ],
)
def test_enumeration_catches_a_wrong_rule(old: str, new: str) -> None:
    rule = partial(mutant(acceptance, old, new), verification="block")
    toys = (Toy(0, 3, 9), Toy(1, 3, 9))
    errors = (toy.error(verified(toy, rule, 2, drafted)[0], 3) for toy in toys for drafted in (1, 2))
    assert any(error > 1e-3 for error in errors)
