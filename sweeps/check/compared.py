"""Answers of a server beside those that they should equal: where they diverge, and whether rounding explains it.

Both sides choose the most likely token at temperature 0. After an equal text their logits differ by rounding only, so
where they choose other tokens each finds its own at most twice that rounding above the other one. How much the server
rounds is seen in the log-probabilities that both sides give the same token after the same text. If only one side shows
log-probabilities it judges alone: how likely it finds the tokens with which the other's text can go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbatch.servers.replies import Reply, Token
from specbatch.sweeps.check.run import find_divergence
from specbatch.sweeps.check.verdict import FACTOR, noise_of

# Nats that rounding may explain in any case: four units in the last place of BF16 for logits of 16 to 32. A run whose
# answers are nearly all equal shows less rounding than there is.
LEAST_GAP = 0.5
# Nats between log-probabilities of a token after the same text. More is a fault, and explains no gap: another model has
# so much noise that it would explain all of its own divergences (llama.cpp with a wrong base of rope: 0.9 to 1.5).
MOST_NOISE = 0.5
_ALIKE = 4  # different tokens that must follow as expected for a shape to be one; an answer that loops shows none

ROUNDING, FAULT, UNJUDGED = "rounding", "fault", "not judged"
EXPECTED, FOUND = "expected", "found"  # sides
_CUT = "\ufffd"  # the beginning of a character
TextOf = Callable[[Sequence[Token]], str]


@dataclass(frozen=True)
class Divergence:
    """Where an answer diverges from the one that it should equal.

    condition   how the answer was asked for
    place       tokens (characters, of a server that shows no tokens) that are equal before it
    gap         nats by which the two tokens differ at least, by the log-probabilities of both sides; None: not known
    by          the side that alone shows log-probabilities, if one does
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
    by: str = ""
    verdict: str = UNJUDGED

    def judged(self, bound: float, most: float) -> Divergence:
        """With a verdict. bound: of the gap that rounding explains; most: of a gap that it may explain. A model that
        chooses between two tokens which are nearly as likely may leave out or repeat a word and go on as before, or as
        after another prompt, so there the gap decides."""
        shape = "" if self.gap is not None and self.gap <= most else self.shape
        if shape or (self.gap is not None and self.gap > most):
            verdict = FAULT
        else:
            verdict = UNJUDGED if self.gap is None or self.gap > bound else ROUNDING
        return replace(self, shape=shape, verdict=verdict)


def bound_of(noises: Sequence[float]) -> float:
    """The gap that rounding explains, from the noise of each prompt, in nats."""
    return max(LEAST_GAP, FACTOR * min(MOST_NOISE, noise_of(noises)))


def most_of(noises: Sequence[float]) -> float:
    """The gap that rounding may explain: where no noise is seen, because one side shows no log-probabilities, that of
    the largest noise that is not itself a fault."""
    return bound_of(noises or [MOST_NOISE])


def noise(wanted: Reply, found: Reply) -> float | None:
    """The largest distance of log-probabilities before the first divergence; None if there are none."""
    shared = min(len(wanted.logprobs), len(found.logprobs), find_divergence(wanted.tokens, found.tokens)[0])
    pairs = zip(wanted.logprobs[:shared], found.logprobs[:shared], strict=True)
    return max((abs(a - b) for a, b in pairs), default=None)


def compare(
    prompt: int, condition: str, wanted: Reply, found: Reply, others: dict[int, Reply], text_of: TextOf
) -> Divergence | None:
    """The divergence of an answer. others: those that other prompts should have; text_of: the text of tokens."""
    ours, theirs = _same_kind(wanted, found)
    place, diverges = find_divergence(ours, theirs)
    if not diverges:
        return None
    is_cut = found.finish_reason == "length" and place == len(theirs) < len(ours) and bool(found.ids or found.pieces)
    shape = "it ends before its length" if is_cut else _shape(ours, theirs, place) or _swapped(theirs, prompt, others)
    by = "" if bool(wanted.pieces) == bool(found.pieces) else EXPECTED if wanted.pieces else FOUND
    sides = (wanted, found) if by == EXPECTED else (found, wanted)
    gap = _gap_of_one(*sides, text_of) if by else _gap(wanted, found, place)
    by = by if gap is not None else ""
    return Divergence(prompt, condition, place, _at(ours, place), _at(theirs, place), gap, shape, by)


def _same_kind(wanted: Reply, found: Reply) -> tuple[list[Any], list[Any]]:
    """Tokens of both where both have ids, or both texts of tokens; else the characters of both."""
    have_ids = bool(wanted.ids) and bool(found.ids)
    if have_ids or (bool(wanted.ids) == bool(found.ids) and bool(wanted.pieces) == bool(found.pieces)):
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


def _gap_of_one(own: Reply, other: Reply, text_of: TextOf) -> float | None:
    """By how much `own`, which shows log-probabilities, finds its token more likely than any with which the text of
    `other` can go on; None if its tokens are not those of its text."""
    whole = text_of(own.pieces).rstrip(_CUT)
    lead = own.text[: len(own.text) - len(own.text.lstrip(" "))] if not whole.startswith(" ") else ""

    def text(*tokens: Token) -> str:
        return (lead + text_of(tokens)).rstrip(_CUT)

    if not (lead + whole).startswith(own.text.rstrip(_CUT)):  # an end token has a text that is not shown
        return None
    for place, token in enumerate(own.pieces):
        before = own.pieces[:place]
        if other.text.startswith(text(*before, token)):
            continue
        top = own.top[place] if place < len(own.top) else {}
        shared = text(*before)
        rest = other.text[len(shared) :]
        texts = {name: text(*before, name)[len(shared) :] for name in top if name != token}
        likely = [top[name] for name, more in texts.items() if (rest.startswith(more) if more else not rest)]
        return own.logprobs[place] - max(likely, default=min(top.values())) if top else None
    return None


def _shape(wanted: list[Any], found: list[Any], place: int) -> str:
    """A token too many or too few, after which the answer goes on as it should."""
    rest = min(len(wanted) - place, len(found) - place - 1)
    is_repeated = place and found[place : place + 1] == found[place - 1 : place]
    after = wanted[place : place + max(0, rest)]
    if is_repeated and len({*after}) >= _ALIKE and found[place + 1 : place + 1 + rest] == after:
        return "a token is repeated, and the rest is as it should be"
    rest = min(len(wanted) - place - 1, len(found) - place)
    after = found[place : place + max(0, rest)]
    if len({*after}) >= _ALIKE and after == wanted[place + 1 : place + 1 + rest]:
        return "a token is missing, and the rest is as it should be"
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
