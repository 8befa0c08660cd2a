"""Does a server honor temperature, top_p, top_k, min_p and seed?"""

from __future__ import annotations

import math
from typing import Any

from specbatch.servers.replies import Reply
from specbatch.sweeps.check.places import HOT, hot_chances, largest_gap
from specbatch.sweeps.check.probe_requests import HONORED, IGNORED, UNTESTED, ProbeRequests, first_token

CHANCE = 1e-4  # of equal sampled answers, up to which a probe is made
COLD = 0.02  # a temperature
_MOST = 32  # requests of one probe


class SamplingProbes(ProbeRequests):
    """Of sampling parameters."""

    def _temperature(self) -> tuple[str, str]:
        found = list(self._answers())
        below = [largest_gap(reply) for _, reply in found if reply.top]
        if below and max(below) > self._clear:
            return IGNORED, f"at temperature 0 a token is {max(below):.2g} nats less likely than the best"
        if not below:
            for place, _ in found[:3]:
                twelve = [(place, {"temperature": 0.0, "max_tokens": 1})] * 12
                firsts = {first_token(reply) for reply in self._replies(twelve)}
                if len(firsts) > 2:
                    return IGNORED, f"12 answers at temperature 0 begin with {len(firsts)} different tokens"
        hot = self._hot(found)
        if self._doubt:
            return hot if hot[0] == IGNORED else (UNTESTED, self._doubt)
        cold = self._cold()
        if IGNORED in (hot[0], cold[0]):
            return hot if hot[0] == IGNORED else cold
        if hot[0] == UNTESTED:
            return hot
        return HONORED, "" if cold[0] == HONORED else f"none between 0 and {HOT:g} was tried: {cold[1]}"

    def _hot(self, found: list[tuple[int, Reply]]) -> tuple[str, str]:
        for place, reply in found:
            length = min(8, len(reply.tokens))
            if reply.top and math.prod(hot_chances(reply)[:length]) ** 15 > CHANCE:
                continue
            texts = {answer.text for answer in self._sampled(place, 16, length)}
            return (HONORED, "") if len(texts) > 1 else (IGNORED, f"16 answers at temperature {HOT:g} are the same")
        return UNTESTED, "the answers are too certain to differ"

    def _cold(self) -> tuple[str, str]:
        """A low temperature is not a higher one: it leaves a token that leads by half a nat, as one that leads by 2
        `clear` does after all rounding, 1e-11 for each other one."""
        for place, reply, count in self._certain(2 * self._clear):
            if not reply.top:
                return UNTESTED, "needs log-probabilities"
            number = _enough(math.exp(sum(reply.logprobs[:count])))
            if number is None:
                continue
            answers = self._sampled(place, number, count, temperature=COLD)
            if others := sum(differs(answer, reply, count) for answer in answers):
                return IGNORED, f"{others} of {number} answers at temperature {COLD:g} are not the most likely one"
            return HONORED, ""
        return UNTESTED, "no answer begins with tokens that are certain enough"

    def _filter(self, **fields: Any) -> tuple[str, str]:
        """A filter that leaves the most likely token only."""
        for place, reply, count in self._certain(self._clear):
            number = _enough(math.prod(hot_chances(reply)[:count])) if reply.top else 16
            if number is None:
                continue
            answers = self._sampled(place, number, count, **fields)
            others = [answer for answer in answers if differs(answer, reply, count)]
            if not others:
                return HONORED, ""
            if reply.top or len({first_token(answer) for answer in others}) > 1:
                return IGNORED, f"{len(others)} of {number} answers at temperature {HOT:g} are not the most likely one"
        return UNTESTED, "no answer begins with tokens that are certain enough"

    def _top_p(self) -> tuple[str, str]:
        return self._filter(top_p=1e-4)

    def _top_k(self) -> tuple[str, str]:
        return self._filter(top_k=1)

    def _min_p(self) -> tuple[str, str]:
        return self._filter(min_p=1.0)

    def _seed(self) -> tuple[str, str]:
        for place, reply in self._answers():
            length = min(12, len(reply.tokens))
            if reply.top and math.prod(hot_chances(reply)[:length]) > 0.05:
                continue
            texts = [[answer.text for answer in self._sampled(place, 4, length)] for _ in range(2)]
            same = sum(first == again for first, again in zip(*texts, strict=True))
            if len({*texts[0], *texts[1]}) == 1:
                return IGNORED, "4 seeds give the same answer"
            if same < 2:
                return IGNORED, f"{4 - same} of 4 seeds give another answer the second time"
            return (
                (HONORED, "") if same > 2 else (UNTESTED, "2 of 4 seeds give another answer, as rounding may explain")
            )
        return UNTESTED, "the answers are too certain to differ"


def differs(answer: Reply, reply: Reply, count: int) -> bool:
    """Whether it has other tokens among the first `count`; an answer may be shorter than it was asked for. Some servers
    show the tokens of one and not of the other."""
    if bool(answer.ids or answer.pieces) != bool(reply.ids or reply.pieces):
        return not reply.text.startswith(answer.text)
    count = min(count, len(answer.tokens))
    return answer.tokens[:count] != reply.tokens[:count]


def _enough(chance: float) -> int | None:
    """How many answers that are equal with this chance make all of them equal by chance improbable; None: too many."""
    number = 4 if chance <= 0 else max(4, math.ceil(math.log(CHANCE) / math.log(chance))) if chance < 1 else _MOST + 1
    return number if number <= _MOST else None
