"""What a probe of a server asks and finds: requests, greedy and sampled answers, and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specbatch.servers.replies import Reply
from specbatch.sweeps.check.places import HOT, clear_tokens

HONORED, IGNORED, WRONG, REFUSED, UNTESTED = "honored", "ignored", "wrong", "refused", "not tested"
LENGTH = 32  # tokens

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


class FailedRequest(Exception):
    """A request of a probe failed, or was refused."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.error)
        self.is_refused = reply.is_refused


class ProbeRequests:
    """The requests of probes of one server.

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

    def _replies(self, requests: Sequence[tuple[int, dict[str, Any]]]) -> list[Reply]:
        found = self._ask(requests)
        for reply in found:
            if reply.error is not None:
                raise FailedRequest(reply)
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


def first_token(reply: Reply) -> Any:
    return next(iter(reply.tokens), None)
