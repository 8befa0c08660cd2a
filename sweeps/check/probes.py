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
from collections.abc import Callable, Sequence
from typing import Any

from specbatch.errors import counted
from specbatch.servers.replies import Reply
from specbatch.sweeps.check.options import PROBES
from specbatch.sweeps.check.penalty_probes import PenaltyProbes
from specbatch.sweeps.check.places import new_token, stop_place
from specbatch.sweeps.check.probe_requests import (
    HONORED,
    IGNORED,
    LENGTH,
    REFUSED,
    UNTESTED,
    WRONG,
    FailedRequest,
    Probe,
    first_token,
)
from specbatch.sweeps.check.sampling_probes import SamplingProbes

_BIAS = 100
_SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}
_DOCUMENTS = ('{"color":"red"}', '{"color":"green"}')
_WITHOUT_TEMPERATURE = ("max_tokens", "usage", "logprobs", "response_format")


class Probes(SamplingProbes, PenaltyProbes):
    """The probes of one server, see `ProbeRequests`. Each is a method of its name."""

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
        except FailedRequest as error:
            return Probe(name, REFUSED if error.is_refused else UNTESTED, str(error))
        return Probe(name, result, detail)

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
                except FailedRequest as error:
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
            first = first_token(reply) if reply.ids or reply.pieces else first_token(self._reply(place, max_tokens=1))
            changed = [first_token(answer) != first for answer in biased]
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


def _length(reply: Reply) -> int:
    return len(reply.ids or reply.pieces) or reply.completion_tokens or 0
