"""Answers of a server beside those that they should equal: where they diverge, and whether rounding explains it.

Both sides choose the most likely token at temperature 0. After an equal text their logits differ by rounding only, so
where they choose other tokens each finds its own at most twice that rounding above the other one. How much the server
rounds is seen in the log-probabilities that both sides give the same token after the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbatch.servers.replies import Reply
from specbatch.sweeps.check.run import find_divergence
from specbatch.sweeps.check.verdict import FACTOR, noise_of

# Nats that rounding may explain in any case: four units in the last place of BF16 for logits of 16 to 32. A run whose
# answers are nearly all equal shows less rounding than there is.
LEAST_GAP = 0.5
# Nats between log-probabilities of a token after the same text. More is a fault, and explains no gap: another model has
# so much noise that it would explain all of its own divergences (llama.cpp with a wrong base of rope: 0.9 to 1.5).
MOST_NOISE = 0.5
_ALIKE = 4  # different tokens that must follow as expected for a shape to be one; an answer that loops shows none
_REPEATED = "a token is repeated, and the rest is as it should be"
_MISSING = "a token is missing, and the rest is as it should be"

ROUNDING, FAULT, UNJUDGED = "rounding", "fault", "not judged"


@dataclass(frozen=True)
class Divergence:
    """Where an answer diverges from the one that it should equal.

    condition   how the answer was asked for
    place       tokens (characters, of a server that shows no tokens) that are equal before it
    gap         by how many nats the two tokens differ at least, by the log-probabilities of both sides; None: not known
    shape       what is wrong, where that can be seen: a token is repeated, the answer is that of another prompt
    verdict     rounding, fault, or not judged
    """

    prompt: int
    condition: str
    place: int
    wanted: Any
    found: Any
    gap: float | None
    shape: str = ""
    verdict: str = UNJUDGED

    def judged(self, bound: float) -> Divergence:
        """With a verdict. bound: of the gap that rounding explains. A model that chooses between two tokens which are
        nearly as likely may leave out or repeat a word and go on as before, so there the gap decides."""
        is_close = self.gap is not None and self.gap <= bound
        if is_close and self.shape in ("", _REPEATED, _MISSING):
            return replace(self, shape="", verdict=ROUNDING)
        return replace(self, verdict=UNJUDGED if self.gap is None and not self.shape else FAULT)


def bound_of(noises: Sequence[float]) -> float:
    """The gap that rounding explains, from the noise of each prompt, in nats."""
    return max(LEAST_GAP, FACTOR * min(MOST_NOISE, noise_of(noises)))


def noise(wanted: Reply, found: Reply) -> float | None:
    """The largest distance of log-probabilities before the first divergence; None if there are none."""
    shared = min(len(wanted.logprobs), len(found.logprobs), find_divergence(wanted.tokens, found.tokens)[0])
    pairs = zip(wanted.logprobs[:shared], found.logprobs[:shared], strict=True)
    return max((abs(a - b) for a, b in pairs), default=None)


def compare(prompt: int, condition: str, wanted: Reply, found: Reply, others: dict[int, Reply]) -> Divergence | None:
    """The divergence of an answer. others: those that other prompts should have."""
    ours, theirs = _same_kind(wanted, found)
    place, diverges = find_divergence(ours, theirs)
    if not diverges:
        return None
    is_cut = found.finish_reason == "length" and place == len(theirs) < len(ours) and bool(found.ids or found.pieces)
    shape = "it ends before its length" if is_cut else _shape(ours, theirs, place) or _swapped(theirs, prompt, others)
    return Divergence(
        prompt, condition, place, _at(ours, place), _at(theirs, place), _gap(wanted, found, place), shape
    )  # fmt: skip


def _same_kind(wanted: Reply, found: Reply) -> tuple[list[Any], list[Any]]:
    """Tokens of both where both have ids, or both texts of tokens; else the characters of both."""
    if bool(wanted.ids) == bool(found.ids) and bool(wanted.pieces) == bool(found.pieces):
        return wanted.tokens, found.tokens
    return list(wanted.text), list(found.text)


def _gap(wanted: Reply, found: Reply, place: int) -> float | None:
    """The larger of what the two sides give their own token over the other's. A token that is not among the most likely
    ones is less likely than all of these."""
    gaps = []
    if place < min(len(wanted.pieces), len(found.pieces)):
        for own, other in ((wanted, found), (found, wanted)):
            if place < len(own.top) and own.top[place]:
                top = own.top[place]
                gaps.append(own.logprobs[place] - top.get(other.pieces[place], min(top.values())))
    return max(gaps, default=None)


def _shape(wanted: list[Any], found: list[Any], place: int) -> str:
    """A token too many or too few, after which the answer goes on as it should."""
    rest = min(len(wanted) - place, len(found) - place - 1)
    is_repeated = place and found[place : place + 1] == found[place - 1 : place]
    after = wanted[place : place + max(0, rest)]
    if is_repeated and len({*after}) >= _ALIKE and found[place + 1 : place + 1 + rest] == after:
        return _REPEATED
    rest = min(len(wanted) - place - 1, len(found) - place)
    after = found[place : place + max(0, rest)]
    if len({*after}) >= _ALIKE and after == wanted[place + 1 : place + 1 + rest]:
        return _MISSING
    return ""


def _swapped(found: list[Any], prompt: int, others: dict[int, Reply]) -> str:
    """The answer of another prompt."""
    if len(found) < 2 * _ALIKE:
        return ""
    same = [place for place, reply in others.items() if place != prompt and reply.tokens == found]
    return f"it is the answer to another prompt ({same[0]})" if len(same) == 1 else ""


def _at(tokens: Sequence[Any], place: int) -> Any:
    return tokens[place] if place < len(tokens) else None


def finite(value: float | None) -> float | None:
    """Ready for JSON."""
    return value if value is None or math.isfinite(value) else None
