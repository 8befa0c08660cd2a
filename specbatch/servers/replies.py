"""Answers of an OpenAI-compatible server with their tokens and log-probabilities, for requests with any fields.

Tokens are ids where the server has them (`return_token_ids` and `return_tokens_as_token_ids` of vLLM, `id` in the
log-probabilities of llama.cpp), else the texts that it shows with its log-probabilities. A server with neither leaves
the text alone. So does one that shows some tokens only: llama.cpp has no log-probabilities of tokens after drafts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from specbatch.servers import client as http_client
from specbatch.servers.answer import texts_of
from specbatch.servers.client import CONNECT_S, Failed, StatusError, Unanswered, describe, events, parsed

if TYPE_CHECKING:
    from specbatch.servers.engine import HttpEngine

Token = int | str
WITH_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_ID = "token_id:"  # before the ids of `return_tokens_as_token_ids`
_LATER = (408, 429)  # status of a request that may be sent again
_BYTES = 2**26  # of a stream
_BUFFER = 2**22  # with return_token_ids the first event has the ids of the prompt, which may be long


@dataclass
class Reply:
    """What a server answered.

    ids         of the tokens, if the server sends them
    pieces      the tokens of its log-probabilities: ids or texts
    logprobs    of `pieces`
    top         the most likely tokens of each place, named as in `pieces`
    unshown     tokens without log-probabilities, where others have them; there are no `pieces` then
    status      of a refused request
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    pieces: list[Token] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[Token, float]] = field(default_factory=list)
    unshown: int = 0
    finish_reason: str | None = None
    drafted: int | None = None  # tokens, as llama.cpp counts them
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    status: int | None = None
    _words: str = ""  # the texts of the tokens that log-probabilities show

    @property
    def tokens(self) -> list[Any]:
        """Ids, else the texts of tokens, else characters: whatever two answers can be compared by."""
        return list(self.ids or self.pieces or self.text)

    @property
    def is_refused(self) -> bool:
        """The server said that it does not accept the request."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in _LATER

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of the stream. Raises Failed."""
        if chunk.get("error"):
            raise Failed(f"the stream ended with an error: {http_client.message_of(json.dumps(chunk))}")
        if isinstance(usage := chunk.get("usage"), dict):
            self.prompt_tokens = _count(usage, "prompt_tokens", self.prompt_tokens)
            self.completion_tokens = _count(usage, "completion_tokens", self.completion_tokens)
        if isinstance(timings := chunk.get("timings"), dict):
            self.drafted = _count(timings, "draft_n", self.drafted)
        choices = chunk.get("choices")
        if not choices:
            return
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise Failed("the stream has a chunk that is not of a completion")
        choice = choices[0]
        self.text += "".join(texts_of(choice))
        self.ids += [token for token in choice.get("token_ids") or [] if isinstance(token, int)]
        try:
            self._take_logprobs(choice.get("logprobs") or {})
        except (TypeError, ValueError, LookupError, AttributeError):
            raise Failed("the stream has logprobs in an unknown form") from None
        if reason := choice.get("finish_reason"):
            self.finish_reason = str(reason)

    def _take_logprobs(self, found: dict[str, Any]) -> None:
        """Of /v1/completions (`tokens`, `token_logprobs`, `top_logprobs`), or of chats and llama.cpp (`content`)."""
        if "content" in found:
            for item in found["content"] or []:
                self.pieces.append(_token(item))
                self._words += str(item["token"])
                self.logprobs.append(float(item["logprob"]))
                self.top.append({_token(other): float(other["logprob"]) for other in item.get("top_logprobs") or []})
        elif found:
            count = len(found["tokens"] or [])
            self.pieces += map(_named, found["tokens"] or [])
            self._words += "".join(found["tokens"] or [])
            self.logprobs += map(float, found["token_logprobs"] or [])
            places = found.get("top_logprobs") or [None] * count
            self.top += [{_named(name): float(value) for name, value in (place or {}).items()} for place in places]

    def check(self) -> None:
        """Refuse an answer that is not complete, at the end of the stream."""
        if self.finish_reason is None:
            raise Failed("the stream ended before its answer did")
        if self.finish_reason not in ("stop", "length"):
            raise Failed(f"the server ended the answer: {http_client.one_line(self.finish_reason, 40)}")
        if self.pieces and not self.ids:
            self._name_tokens()

    def _name_tokens(self) -> None:
        """Take the tokens from the log-probabilities, if these show all of the answer."""
        count = self.completion_tokens or 0
        # An end token may be counted and not shown. llama.cpp also shows no token that is a part of a character.
        is_whole = self._words == self.text and self.finish_reason == "stop" and "\ufffd" not in self.text
        if len(self.pieces) < count and not is_whole:
            self.unshown = count - len(self.pieces)
            self.pieces, self.logprobs, self.top = [], [], []
        elif all(isinstance(token, int) for token in self.pieces):
            self.ids = [token for token in self.pieces if isinstance(token, int)]

    def as_row(self) -> dict[str, Any]:
        """Ready for JSON."""
        found = {
            "text": self.text, "tokens": self.ids or self.pieces, "logprobs": self.logprobs,
            "finish_reason": self.finish_reason, "completion_tokens": self.completion_tokens, "error": self.error,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value not in (None, [])}


def _token(item: dict[str, Any]) -> Token:
    number = item.get("id")
    return number if isinstance(number, int) and not isinstance(number, bool) else _named(str(item["token"]))


def _named(text: str) -> Token:
    number = text.removeprefix(_ID)
    return int(number) if number != text and number.isdecimal() else text


def _count(usage: dict[str, Any], name: str, before: int | None) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else before


@dataclass(frozen=True)
class Shown:
    """What a server shows of its tokens. fields: that ask for it."""

    fields: dict[str, Any]
    ids: bool
    logprobs: bool


@dataclass(frozen=True)
class Question:
    """A request: its prompt, and the fields that say how it is to be continued."""

    prompt: list[int]
    fields: dict[str, Any]


def ask(
    engine: HttpEngine,
    questions: Sequence[Question],
    *,
    concurrency: int = 1,
    on_reply: Callable[[int, Reply], None] | None = None,
) -> list[Reply]:
    """The streamed answers to `questions`, at most `concurrency` of them in flight. A request that fails is a reply
    with an `error`. on_reply: called with the place of each question and its reply, as it ends."""
    bodies = []
    for question in questions:
        fields, path = engine.question(question.prompt)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        bodies.append((f"{engine.server.base_url}{path}", fields | question.fields | usage))
    return asyncio.run(_ask(engine, bodies, concurrency, on_reply))


async def _ask(
    engine: HttpEngine,
    bodies: list[tuple[str, dict[str, Any]]],
    concurrency: int,
    on_reply: Callable[[int, Reply], None] | None,
) -> list[Reply]:
    done = [Reply() for _ in bodies]
    headers, seconds = engine.server.headers, engine.server.request_timeout
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S, sock_read=engine.server.idle_timeout)

    async def work(session: aiohttp.ClientSession, index: int) -> None:
        url, body = bodies[index]
        start, reply = time.perf_counter(), done[index]
        try:
            try:
                await _stream(session, url, body, reply)
            except Unanswered:
                async with http_client.session(headers, timeout, reuse=False, buffer=_BUFFER) as fresh:
                    await _stream(fresh, url, body, reply)
            reply.check()
        except Exception as error:  # whatever an answer leads to fails its request and not the check
            reply.error = describe(error)
            if isinstance(error, StatusError):
                reply.status = error.status
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                reply.error = f"not finished after {time.perf_counter() - start:.0f} s"
        if on_reply is not None:
            on_reply(index, reply)

    opened = http_client.session(headers, timeout, buffer=_BUFFER)
    await http_client.in_flight(len(bodies), concurrency, opened, work)
    return done


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], reply: Reply) -> None:
    async with session.post(url, json=body, allow_redirects=False) as response:
        await http_client.check_status(response)
        async for event in events(response, _BYTES):
            reply.take(parsed(event))
