"""Which settings of a request does a server honor? Each is probed by what it must change.

A probe must not call a clean server faulty, though a server rounds: it may choose another token where two are nearly
equally likely. So a probe looks only where its effect is certain by the server's own log-probabilities, at tokens that
lead the next one by more than `clear`, and is left out where no prompt has such a place. Sampled answers that must
differ do so unless they are equal by chance, whose probability is kept below `CHANCE`. Without log-probabilities a
probe needs two tokens that rounding does not explain, as rounding swaps two tokens and no third one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specbatch.errors import counted
from specbatch.servers.replies import Reply, Token
from specbatch.sweeps.check.options import PROBES
from specbatch.sweeps.check.places import (
    HOT,
    clear_tokens,
    first_change,
    hot_chances,
    largest_gap,
    lead,
    new_token,
    repeats,
    stop_place,
)

HONORED, IGNORED, WRONG, REFUSED, UNTESTED = "honored", "ignored", "wrong", "refused", "not tested"
CHANCE = 1e-4  # of equal sampled answers, up to which a probe is made
LENGTH = 32  # tokens
COLD = 0.02  # a temperature
_MOST = 32  # requests of one probe
_BIAS = 100
_SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}
_DOCUMENTS = ('{"color":"red"}', '{"color":"green"}')

Ask = Callable[[Sequence[tuple[int, dict[str, Any]]]], list[Reply]]  # of (prompt, fields)


@dataclass(frozen=True)
class Probe:
    """What a probe found. result: honored, ignored, wrong, refused (the server says so), or not tested."""

    name: str
    result: str
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        return self.result in (IGNORED, WRONG)


class _Failed(Exception):
    """A request of a probe failed, or was refused."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.error)
        self.is_refused = reply.is_refused


class Probes:
    """The probes of one server.

    ask       sends requests, and returns their replies
    prompts   token ids
    shows     the fields that make the server show tokens and log-probabilities
    clear     by how much a token must lead the next one, in nats, for rounding not to change it
    encode    the token ids of a text
    decode    the text of token ids
    length    tokens of the greedy answers that the probes are made from
    greedy    those that are known, by prompt
    doubt     why answers at temperature 0 cannot be relied on, if so
    is_llamacpp   whether the server has the names of llama.cpp
    """

    def __init__(
        self, ask: Ask, prompts: list[list[int]], shows: dict[str, Any], clear: float,
        encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], *, length: int = LENGTH,
        greedy: dict[int, Reply] | None = None, doubt: str = "", end: int | None = None, is_llamacpp: bool = False,
    ) -> None:  # fmt: skip
        self._ask, self._prompts, self._shows, self._clear = ask, prompts, shows, clear
        self._encode, self._decode, self._end, self._is_llamacpp = encode, decode, end, is_llamacpp
        self._greedy = {place: reply for place, reply in (greedy or {}).items() if reply.error is None}
        self._doubt, self._tokens = doubt, length

    def run(self, names: Sequence[str], on_probe: Callable[[], None] = lambda: None) -> list[Probe]:
        """The probes of `names`, in the order of `PROBES`."""
        found: list[Probe] = []
        doubt = ""
        for name in PROBES:
            is_needed = name == "temperature" and not {*names} <= {*_WITHOUT_TEMPERATURE}
            if name not in names and not is_needed:
                continue
            probe = Probe(name, UNTESTED, doubt) if doubt and name not in _WITHOUT_TEMPERATURE else self._one(name)
            if name == "temperature":
                doubt = "needs a server that honors temperature" if probe.is_bad else self._doubt
            if name in names:
                found.append(probe)
                on_probe()
        return found

    def _one(self, name: str) -> Probe:
        try:
            result, detail = getattr(self, f"_{name}")()
        except _Failed as error:
            return Probe(name, REFUSED if error.is_refused else UNTESTED, str(error))
        return Probe(name, result, detail)

    # -- answers ----------------------------------------------------------------------------------------------

    def _replies(self, requests: Sequence[tuple[int, dict[str, Any]]]) -> list[Reply]:
        found = self._ask(requests)
        for reply in found:
            if reply.error is not None:
                raise _Failed(reply)
        return found

    def _reply(self, prompt: int, **fields: Any) -> Reply:
        return self._replies([(prompt, {"temperature": 0.0, "max_tokens": self._tokens, **self._shows, **fields})])[0]

    def _answers(self) -> Iterator[tuple[int, Reply]]:
        """The prompts with their greedy answers."""
        for place in range(len(self._prompts)):
            if place not in self._greedy:
                self._greedy[place] = self._reply(place)
            if self._greedy[place].tokens:
                yield place, self._greedy[place]

    def _sampled(self, prompt: int, count: int, length: int, **fields: Any) -> list[Reply]:
        base = {"max_tokens": length, **self._shows, "top_p": 1.0, "top_k": self._off, "min_p": 0.0}
        own = base | {"temperature": HOT} | fields
        return self._replies([(prompt, own | {"seed": 1_000 + number}) for number in range(count)])

    @property
    def _off(self) -> int:
        return 0 if self._is_llamacpp else -1

    def _certain(self, least: float) -> Iterator[tuple[int, Reply, int]]:
        """Prompts with the greedy answer and how many of its first tokens lead by `least`; 1 without log-probabilities,
        which is not certain."""
        for place, reply in self._answers():
            count = clear_tokens(reply, least) if reply.top else 1
            if count:
                yield place, reply, count

    # -- probes -----------------------------------------------------------------------------------------------

    def _temperature(self) -> tuple[str, str]:
        found = list(self._answers())
        below = [largest_gap(reply) for _, reply in found if reply.top]
        if below and max(below) > self._clear:
            return IGNORED, f"at temperature 0 a token is {max(below):.2g} nats less likely than the best"
        if not below:
            for place, _ in found[:3]:
                firsts = {_first(reply) for reply in self._replies(_same(place, 12, temperature=0.0, max_tokens=1))}
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
            if others := sum(_differs(answer, reply, count) for answer in answers):
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
            others = [answer for answer in answers if _differs(answer, reply, count)]
            if not others:
                return HONORED, ""
            if reply.top or len({_first(answer) for answer in others}) > 1:
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

    def _presence_penalty(self) -> tuple[str, str]:
        return self._penalty("presence_penalty")

    def _frequency_penalty(self) -> tuple[str, str]:
        return self._penalty("frequency_penalty")

    def _penalty(self, name: str) -> tuple[str, str]:
        """At 2 a token that the answer has must give way to a new one that is less than 2 below it; at -2 a new one to
        one that the answer has."""
        for place, reply in self._answers():
            for value in (-2.0, 2.0):
                end = first_change(reply, self._prompt_of(place, reply), is_raised=value < 0, least=2 - self._clear)
                if end is None:
                    continue
                return self._penalized(place, reply, end, name, value)
        return self._without_effect

    def _penalized(self, place: int, reply: Reply, end: int, name: str, value: float) -> tuple[str, str]:
        """Whether a penalty changes one of the first `end` tokens, as it must. SGLang counts tokens of one verify
        afterwards only, so that its penalties come late with drafts."""
        answer = self._reply(place, max_tokens=end, **{name: value})
        if answer.tokens[:end] != reply.tokens[:end]:
            return HONORED, ""
        pairs = zip(self._reply(place, **{name: value}).tokens, reply.tokens, strict=False)
        late = next((at for at, (found, without) in enumerate(pairs) if found != without), None)
        if late is not None and late < len(reply.top) and lead(reply, late) > self._clear:
            return (
                WRONG,
                f"{value:g} changes token {late} first, and must change one of the first {counted(end, 'token')}",
            )
        return IGNORED, f"{value:g} does not change an answer that it must change"

    def _repetition_penalty(self) -> tuple[str, str]:
        """vLLM and transformers count tokens of prompt and answer, SGLang those of the answer only."""
        found = [(place, reply, repeats(reply, self._prompt_of(place, reply))) for place, reply in self._answers()]
        of_answer = self._repeated([(place, reply, ends) for place, reply, (ends, _) in found])
        if of_answer is not None and of_answer[0] != HONORED:
            return of_answer
        of_prompt = self._repeated([(place, reply, ends) for place, reply, (_, ends) in found])
        if of_prompt is None or of_prompt[0] == HONORED:
            return of_prompt or of_answer or self._without_effect
        text = "tokens of the prompt do not count"
        return (HONORED, text) if of_answer else (UNTESTED, f"{text}, and no answer repeats its own")

    def _repeated(self, found: list[tuple[int, Reply, list[int]]]) -> tuple[str, str] | None:
        """Whether a penalty of 2 changes near ties. It takes half of a logit, which may be small, so that only two that
        stay show that it is ignored."""
        name, tried = "repeat_penalty" if self._is_llamacpp else "repetition_penalty", 0
        for place, reply, ends in sorted(found, key=lambda one: -len(one[2])):
            if not ends:
                break
            result = self._penalized(place, reply, ends[:2][-1], name, 2.0)
            tried += len(ends[:2])
            if result[0] == HONORED or tried > 1:
                return result
        return None

    def _prompt_of(self, place: int, reply: Reply) -> set[Token]:
        """The tokens of a prompt, named as the log-probabilities of its answer name them: SGLang sends ids of answers,
        and texts with its log-probabilities."""
        ids = self._prompts[place]
        if any(isinstance(token, int) for token in reply.pieces):
            return {*ids}
        return {self._decode([token]) for token in ids}

    @property
    def _without_effect(self) -> tuple[str, str]:
        shown = any(reply.top for reply in self._greedy.values())
        return UNTESTED, "no answer that it must change" if shown else "needs log-probabilities"

    def _stop(self) -> tuple[str, str]:
        for place, reply in self._answers():
            text, at = reply.text, stop_place(reply.text)
            if at is None or self._reply(place).text != text:
                continue
            stop, wanted = text[at : at + 2], text[:at]
            found = self._reply(place, stop=[stop]).text
            if found == wanted:
                return HONORED, ""
            if found == text:
                return IGNORED, "the answer goes on after the stop string"
            if found.startswith(wanted):
                return WRONG, f"{counted(len(found) - at, 'character')} from the stop string on are kept"
            if wanted.startswith(found):
                return WRONG, f"{counted(at - len(found), 'character')} before the stop string are lost"
        return UNTESTED, "no answer is the same twice and has a place for a stop string"

    def _max_tokens(self) -> tuple[str, str]:
        for place in range(len(self._prompts)):
            reply = self._reply(place, max_tokens=9, ignore_eos=True)
            count = len(reply.ids or reply.pieces) or reply.completion_tokens
            if count is None:
                return UNTESTED, "the server shows neither tokens nor usage"
            if reply.finish_reason == "length" or count > 9:
                return (HONORED, "") if count == 9 else (WRONG, f"{counted(count, 'token')} for max_tokens=9")
        return UNTESTED, "all answers end before 9 tokens"

    def _usage(self) -> tuple[str, str]:
        """The counts of an answer."""
        for place in range(len(self._prompts)):
            reply = self._reply(place, max_tokens=9, ignore_eos=True)
            if reply.completion_tokens is None:
                return UNTESTED, "the server sends no usage"
            count = len(reply.ids or reply.pieces)
            if not count:
                return UNTESTED, "the server does not show tokens"
            if reply.finish_reason == "length":
                shown = f"{reply.completion_tokens} completion_tokens for {counted(count, 'token')}"
                return (HONORED, "") if reply.completion_tokens == count else (WRONG, shown)
        return UNTESTED, "all answers end before 9 tokens"

    def _min_tokens(self) -> tuple[str, str]:
        """An end that comes at once without it: a token that is forced, or one of the greedy answer as a stop token."""
        least = 6
        for place, reply in self._answers():
            ends: list[dict[str, Any]] = []
            if reply.ids and (at := new_token(reply.ids)) is not None:
                ends.append({"stop_token_ids": [reply.ids[at]]})
            if self._end is not None:
                ends.append({"logit_bias": {str(self._end): _BIAS}})
            for end in ends:
                try:
                    short, long = (self._reply(place, min_tokens=count, **end) for count in (0, least))
                except _Failed as error:
                    if error.is_refused and "logit_bias" in end:  # vLLM with drafts, which knows min_tokens
                        continue
                    raise
                if _length(short) < least and short.finish_reason == "stop":
                    return (
                        (HONORED, "")
                        if _length(long) >= least
                        else (IGNORED, f"{counted(_length(long), 'token')} for {least}")
                    )
        return UNTESTED, "no answer could be ended early (stop_token_ids, logit_bias)"

    def _logit_bias(self) -> tuple[str, str]:
        for place, reply in self._answers():
            ids = reply.ids or [one for one in reply.pieces if isinstance(one, int)] or self._encode(reply.text)
            other = next((token for token in ids if token != ids[0]), None)
            if other is None:
                continue
            biased = [
                self._reply(place, max_tokens=1, logit_bias={str(token): bias})
                for token, bias in ((other, _BIAS), (ids[0], -_BIAS))
            ]
            first = _first(reply) if reply.ids or reply.pieces else _first(self._reply(place, max_tokens=1))
            changed = [_first(answer) != first for answer in biased]
            if all(changed):
                return HONORED, ""
            return (WRONG, f"only one of {_BIAS} and -{_BIAS} has an effect") if any(changed) else (
                IGNORED, f"neither {_BIAS} nor -{_BIAS} changes the first token"
            )  # fmt: skip
        return UNTESTED, "no answer has two different tokens"

    def _logprobs(self) -> tuple[str, str]:
        for _, reply in self._answers():
            if reply.unshown:
                return WRONG, f"none are sent for {reply.unshown} of {counted(reply.completion_tokens or 0, 'token')}"
            if not reply.top:
                return IGNORED, "none are sent"
            if not len(reply.tokens) == len(reply.logprobs) == len(reply.top):
                return WRONG, f"{len(reply.logprobs)} log-probabilities for {counted(len(reply.tokens), 'token')}"
            for token, value, top in zip(reply.pieces, reply.logprobs, reply.top, strict=False):
                if value > 1e-3 or sum(map(math.exp, top.values())) > 1.01:
                    return WRONG, "probabilities are above 1"
                least = min(top.values(), default=value)
                if (abs(top[token] - value) if token in top else value - least) > self._clear:
                    return WRONG, "a token has another log-probability among the most likely ones"
        return HONORED, ""

    def _response_format(self) -> tuple[str, str]:
        form = {"type": "json_schema", "json_schema": {"name": "probe", "schema": _SCHEMA, "strict": True}}
        reply = self._reply(0, max_tokens=LENGTH, response_format=form)
        compact = re.sub(r"\s", "", reply.text)
        if compact in _DOCUMENTS or (
            reply.finish_reason == "length" and any(d.startswith(compact) for d in _DOCUMENTS)
        ):
            return HONORED, ""
        return IGNORED, "the answer does not follow the JSON schema"


_WITHOUT_TEMPERATURE = ("max_tokens", "usage", "logprobs", "response_format")


def _differs(answer: Reply, reply: Reply, count: int) -> bool:
    """Whether it has other tokens among the first `count`; an answer may be shorter than it was asked for. Some servers
    show the tokens of one and not of the other."""
    if bool(answer.ids or answer.pieces) != bool(reply.ids or reply.pieces):
        return not reply.text.startswith(answer.text)
    count = min(count, len(answer.tokens))
    return answer.tokens[:count] != reply.tokens[:count]


def _first(reply: Reply) -> Any:
    return next(iter(reply.tokens), None)


def _length(reply: Reply) -> int:
    return len(reply.ids or reply.pieces) or reply.completion_tokens or 0


def _enough(chance: float) -> int | None:
    """How many answers that are equal with this chance make all of them equal by chance improbable; None: too many."""
    number = 4 if chance <= 0 else max(4, math.ceil(math.log(CHANCE) / math.log(chance))) if chance < 1 else _MOST + 1
    return number if number <= _MOST else None


def _same(prompt: int, count: int, **fields: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(prompt, dict(fields))] * count
