"""Why the same drafter has another accept length in another engine: reasons that the numbers can tell apart.

A drafter that is fed or built wrongly leaves a pattern in the acceptance of its drafts:

* other features of the target, shifted by a layer or a token: fewer first drafts are accepted, at every length of the
  context
* another rope theta or scaling, or a shorter window: the loss grows with the context
* a mistake in the steps after the first one (hidden state, cache, positions): first drafts are as good as before
* another mapping of a reduced vocabulary, other weights: hardly any draft is accepted
* fewer drafts, such as none near the ends of answers: those that are made are accepted as often

Tests are of the accept length and of the conditional acceptance at each position, over prompts, with Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION
from specbatch.errors import counted
from specbatch.records.differences import conflicts
from specbatch.records.estimates import CONFIDENCE, Estimate, holm
from specbatch.records.intervals import LEAST_PROMPTS
from specbatch.sweeps.report.prompt_acceptance import Difference, Prompt, Side, sampling_of

ALPHA = 1 - CONFIDENCE
HARDLY_ANY = 0.2  # of the first drafts that the other engine accepts
SMALL = 0.1  # of the accepted drafts: less shows no pattern
LEAST_VERIFIES = 8  # of an answer, before one more of them is a pattern
_SHAPE = ("algorithm", "draft_tokens", "draft_steps", "draft_topk", "verification")
_OF_DRAFT = ("aux_layers", "draft_rope_theta", "draft_quantization")  # settings of this engine alone

_FEATURES = (
    "features of the target that are shifted: layers counted by another convention (--aux-layers), or by one token"
)
_WEIGHTS = "another quantization or precision of the draft model, or another chat template"
_ROPE = "another rope theta or scaling of the draft (--draft-rope-theta), or a shorter window"
_VOCABULARY = "another mapping of the draft's reduced vocabulary to the target's, or other weights"
_STEPS = "the steps of the draft after its first one: its hidden state, cache or positions"


@dataclass(frozen=True)
class Growth:
    """How many accepted drafts per verify the lower engine has, as a share of those of the other one, in contexts below
    `start` tokens and from there on, and the estimate of what the share gains from one to the other."""

    start: int
    shares: tuple[float, float]
    estimate: Estimate

    @property
    def is_loss(self) -> bool:
        ends = self.estimate.ends()
        return ends is not None and ends[1] < 0

    def excludes(self, loss: float) -> bool:
        """Whether the share does not fall by as much as `loss`."""
        ends = self.estimate.ends()
        return ends is not None and ends[0] > -loss

    def __str__(self) -> str:
        low, high = self.shares
        return f"{low:.0%} of them after fewer than {self.start} tokens, {high:.0%} after more"


def reasons(found: Difference) -> list[str]:
    """What the numbers say of the difference, one sentence each."""
    return list(_reasons(found))


def _reasons(found: Difference) -> Iterator[str]:
    base, other = found.base, found.other
    if any(side.records[0].simulated_acceptance for side in (base, other)):
        yield "acceptance was simulated, so that it says nothing about drafts"
        return
    set_otherwise = conflicts(sampling_of(base.records[0]), sampling_of(other.records[0]))
    if found.pairing.indices is None:
        yield "other prompts: measure both with the same ones"
    if set_otherwise:
        yield f"other sampling or lengths: {'; '.join(set_otherwise)}"
    if found.pairing.indices is None or set_otherwise:
        return
    if found.length.interval.low is None:
        yield f"not judged: {found.length.interval.over}"
        return
    length_differs, differing = _differing(found)
    if lost := [f"{side.uncounted} of {side.label}" for side in (base, other) if side.uncounted]:
        yield f"accept lengths are not judged: verifies without drafts are of no known request, {' and '.join(lost)}"
        length_differs = False
    if length_differs or differing:
        yield next(_explained(found, differing), None) or _unexplained(found)
    elif not lost:
        yield "no difference beyond chance"


def _explained(found: Difference, differing: list[int]) -> Iterator[str]:
    """The first reason is the one that counts."""
    base, other = found.base, found.other
    if base.positions and other.positions and base.positions != other.positions:
        many = f"{base.label} drafts {counted(base.positions, 'token')} and {other.label} {other.positions}"
        yield f"{many}: compare with the same number of drafts"
    if shape := _conflicts_of(found):
        yield f"other settings: {'; '.join(shape)}"
    if sampling_of(base.records[0]).get("sampling"):
        yield (
            "answers are sampled: engines sample drafts or take the most likely ones, which changes acceptance; "
            "compare at temperature 0"
        )
    if not differing and (fewer := _fewer_drafts(found)) is not None:
        yield fewer
    lower, higher = (other, base) if found.length.value < 0 else (base, other)
    if (loss := _loss(found)) < SMALL:
        yield f"{lower.label} accepts {loss:.1%} fewer drafts, which rounding in the draft may explain"
    growth, others = _growth(found, lower, higher), ""
    if (same := found.pairing.same) is not None and not found.pairing.of_same_answers:
        others = f", or the answers, of which {same} of {found.pairing.total} are the same"
    if growth is not None and growth.is_loss:
        cause = _ROPE if _takes_draft(found) else "how far back tokens are looked up"
        than = f"{lower.label} has fewer accepted drafts than {higher.label}, the fewer the longer the context"
        yield f"{than} ({growth}): {cause}{_set(found)}{others}"
    fewer_accepted = [place for place in differing if found.positions[place].value * found.length.value > 0]
    if fewer_accepted and (pattern := _pattern(found, fewer_accepted[0], lower, growth)) is not None:
        yield pattern + others


def _pattern(found: Difference, place: int, lower: Side, growth: Growth | None) -> str | None:
    """The reason that follows from where acceptance is lower. place: the first draft position where it is."""
    change = found.positions[place]
    few, many = sorted(value for value in (change.before, change.after) if value is not None)
    name, heads = _algorithm(found), _takes_draft(found)
    theirs = f"{lower.label} accepts {few:.0%} in place of {many:.0%} of draft {place + 1}"
    if place > 0:
        return f"{theirs} (where tried), and no fewer before it: {_STEPS}{_set(found)}" if heads else None
    if few < HARDLY_ANY * many and heads:
        return f"{theirs}, hardly any: {_VOCABULARY}{_set(found)}"
    cause = _FEATURES
    if name is not None and not heads:
        cause = f"other settings of the algorithm ({', '.join(ALGORITHMS[name].settings)})"
    elif name is not None and ALGORITHMS[name].drafts_by_model:
        cause = _WEIGHTS
    if growth is None:
        told = "contexts are of one length, so a rope theta is not excluded"
    elif growth.excludes((1 - min(growth.shares)) / 2):
        told = f"at every length of the context ({growth})"
    else:
        told = "too few prompts to see whether it grows with the context, so a rope theta is not excluded"
    return f"{theirs}, {told}: {cause}{_set(found)}"


def _unexplained(found: Difference) -> str:
    tested = ["prompts", "sampling", "settings that are known"]
    if found.pairing.of_same_answers:
        tested.append("ends of answers")
    lacking = [side.label for side in (found.base, found.other) if not side.positions]
    if not lacking:
        return f"differs; not explained by {', '.join(tested)}, draft position or context"
    works = f"{' and '.join(lacking)} reports no draft positions of single requests"
    return f"differs; not explained by {', '.join(tested)}; {works}, which would tell more"


def _loss(found: Difference) -> float:
    """Of the accepted drafts of a verify."""
    low, high = sorted(value for value in (found.length.before, found.length.after) if value is not None)
    return (high - low) / (high - 1) if high > 1 else 0.0


def _differing(found: Difference) -> tuple[bool, list[int]]:
    """Whether the accept length differs by more than chance, and at which draft positions, from 0, acceptance does.
    Where one side counts drafts after the end of answers and the other does not: by more than one verify of each
    answer."""
    bounds = [_share_of_ends(found, place) for place in range(len(found.positions))]
    p_values = [change.p_value(bound) for change, bound in zip(found.positions, bounds, strict=True)]
    length, *places = holm([found.length.p_value(), *p_values])
    return length < ALPHA, [place for place, p in enumerate(places) if p < ALPHA]


def _share_of_ends(found: Difference, place: int) -> float:
    """Of the verifies that tried a draft: one for each answer, where the sides count them otherwise."""
    if found.base.untrimmed == found.other.untrimmed:
        return 0.0
    shares = []
    for side in (found.base, found.other):
        tried = sum(one.tried[place] for one in side.prompts.values() if place < len(one.tried))
        shares.append(sum(one.answers for one in side.prompts.values()) / tried if tried else 1.0)
    return max(shares)


def _fewer_drafts(found: Difference) -> str | None:
    """Where the drafts that are made are accepted as often: whether one engine makes fewer."""
    base, other, drafts = found.base, found.other, found.drafts
    most = max(base.positions, other.positions)
    bound = most * _share_of_ends(found, 0)
    if found.length.value * drafts.value <= 0 or drafts.p_value(bound) >= ALPHA:
        return None
    lower, few, many = other.label, drafts.after or 0.0, drafts.before or 0.0
    if drafts.value > 0:
        lower, few, many = base.label, many, few
    text = f"{lower} drafts {few:.2f} in place of {many:.2f} tokens per verify, which are accepted as often"
    if not found.pairing.of_same_answers or found.pairing.indices is None:
        return text
    each = [[side.prompts[index] for index in found.pairing.indices] for side in (base, other)]
    verifies = np.array([[one.verifies / one.answers for one in side] for side in each])
    more = abs(verifies[1] - verifies[0]).max()
    if verifies.min() < LEAST_VERIFIES or more > most:
        return text
    return f"{text}, at most {more:g} verifies more for each of the equal answers: it may not draft up to their ends"


def _growth(found: Difference, lower: Side, higher: Side) -> Growth | None:
    """None where the contexts have one length, or too few prompts. By the context of each verify; of servers that do
    not show it, by the length of the prompt."""
    if found.pairing.indices is None:
        return None
    shared = [(lower.prompts[index], higher.prompts[index]) for index in lower.prompts if index in higher.prompts]
    chosen = [(lower.prompts[index], higher.prompts[index]) for index in found.pairing.indices]
    return _growth_of(chosen) or _growth_of(shared)


def _growth_of(pairs: list[tuple[Prompt, Prompt]]) -> Growth | None:
    known = [pair for pair in pairs if all(one.knows_contexts for one in pair)]
    counts = [(low.context, high.context) for low, high in known]
    if not known:
        counts = [(low.prompt_length, high.prompt_length) for low, high in pairs]
    best: tuple[int, int, Any] = (0, 0, None)
    for start in sorted({length for pair in counts for one in pair for length in one}):
        rows = np.array([_around(start, low) + _around(start, high) for low, high in counts], float)
        # Of the prompts only some reach both kinds of contexts.
        reach = min(int(np.count_nonzero(rows[:, at])) for at in (0, 2, 4, 6))
        if reach > best[0]:
            best = reach, start, rows
    reach, start, rows = best
    if reach < LEAST_PROMPTS:
        return None

    def shares(sums: Any) -> Any:
        return [(sums[..., at + 1] / sums[..., at] - 1) / (sums[..., at + 5] / sums[..., at + 4] - 1) for at in (0, 2)]

    with np.errstate(all="ignore"):
        whole, left = shares(rows.sum(0)), shares(rows.sum(0) - rows)
        values = len(rows) * (whole[1] - whole[0]) - (len(rows) - 1) * (left[1] - left[0])
    if not np.isfinite(values).all():
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    estimate = Estimate(float(whole[1] - whole[0]), error, reach - 1)
    return Growth(start, (float(whole[0]), float(whole[1])), estimate)


def _around(start: int, counts: dict[int, list[int]]) -> list[int]:
    """Verifies and emitted tokens in contexts below `start`, and from there on."""
    sides = [[0, 0], [0, 0]]
    for length, (verifies, emitted) in counts.items():
        side = sides[length >= start]
        side[0] += verifies
        side[1] += emitted
    return [*sides[0], *sides[1]]


def _takes_draft(found: Difference) -> bool:
    """Whether the drafter has weights, as far as it is known."""
    name = _algorithm(found)
    return name is None or ALGORITHMS[name].draft is not None or ALGORITHMS[name].in_target


def _algorithm(found: Difference) -> str | None:
    """None if neither side is known."""
    names = [str(side.speculation["algorithm"]) for side in (found.base, found.other)]
    return next((name for name in names if name != NO_SPECULATION), None)


def _conflicts_of(found: Difference) -> list[str]:
    """Settings of the draft that both sides have, and not the same."""
    name = _algorithm(found)
    if any(side.speculation["algorithm"] != name for side in (found.base, found.other)):
        return []
    names = (*_SHAPE, *(one for one in ALGORITHMS[str(name)].settings if one not in _OF_DRAFT))
    asked = [{one: side.speculation.get(one) for one in names} for side in (found.base, found.other)]
    both = [one for one in names if all(own[one] is not None for own in asked)]
    return conflicts(*({one: own[one] for one in both} for own in asked))


def _set(found: Difference) -> str:
    """What of the draft was set here."""
    parts = [
        f"{side.label} ran with {name} {value}"
        for side in (found.base, found.other)
        for name in _OF_DRAFT
        if (value := side.speculation.get(name)) is not None
    ]
    return f" ({'; '.join(parts)})" if parts else ""
