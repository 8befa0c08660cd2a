"""Bounded HTTP client: deadlines, sizes and one-line errors for requests to a server that is not trusted.

aiohttp parses HTTP in C: a streamed chunk costs 0.13 ms of CPU time on a slow core where httpx needs 0.3 ms. A slower
client would delay the chunks of other requests, and with them every measured time.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

CONNECT_S = 10.0  # to connect, and for a whole answer of read_text()
BUFFER_BYTES = 2**16  # per connection, unless a caller needs more; a line of a stream has at most twice as many
BODY_BYTES = 2**24  # of an answer that is not streamed
ERROR_BYTES = 2**16  # read of the body of an error
MESSAGE_LENGTH = 160  # of a server's error, which says how long a prompt may be in its second sentence
DONE = b"[DONE]"
LINGER_S = 0.1  # after [DONE], for the end of the answer, so that the connection can be used again


class Failed(Exception):
    """A request that failed; the message has the reason, in one line."""


class StatusError(Failed):
    """An answer with a status other than 200."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status


class Unanswered(aiohttp.ServerDisconnectedError):
    """The connection ended before a byte of the answer came: the request can be sent again (RFC 9112, 9.3.1)."""


class _Connection(ResponseHandler):
    """A connection that ends with `Unanswered` while no byte of an answer has come."""

    _silent = False

    def set_response_params(self, **params: Any) -> None:  # before each request
        self._silent = True
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        self._silent = self._silent and not data
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        super().set_exception(Unanswered() if self._silent else exc, *cause)


class _Connector(aiohttp.TCPConnector):
    """Without a limit on connections."""

    def __init__(self, *, reuse: bool) -> None:
        super().__init__(limit=0, force_close=not reuse)
        handler: type[ResponseHandler] = _Connection
        self._factory = partial(handler, loop=self._loop)


# What aiohttp raises for a server that breaks the protocol, the connection or a limit.
ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError, ValueError, Failed)
_BROKEN = (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionResetError)


def session(
    headers: dict[str, str],
    timeout: aiohttp.ClientTimeout | None = None,
    *,
    reuse: bool = True,
    buffer: int = BUFFER_BYTES,
) -> aiohttp.ClientSession:
    """A session without limits on connections, without cookies, and without compression, which would delay chunks.

    reuse   whether a connection serves further requests
    buffer  bytes per connection
    """
    return aiohttp.ClientSession(
        connector=_Connector(reuse=reuse),
        timeout=timeout or aiohttp.ClientTimeout(total=CONNECT_S),
        headers={**headers, "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=buffer,
    )


async def in_flight(
    count: int,
    concurrency: int,
    opened: aiohttp.ClientSession,
    work: Callable[[aiohttp.ClientSession, int], Awaitable[None]],
) -> None:
    """Do `work` for the numbers up to `count`, in order, at most `concurrency` at a time, in a session that is closed
    afterwards. Raises the first exception of `work`."""
    waiting = deque(range(count))

    async def worker(session: aiohttp.ClientSession) -> None:
        while waiting:
            await work(session, waiting.popleft())

    try:
        async with opened as session, asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, count)):
                group.create_task(worker(session))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def read_text(url: str, headers: dict[str, str], *, method: str = "GET", body: Any = None) -> str:
    """The text at `url`. body: sent as JSON, if any. Raises one of ERRORS for anything but status 200."""
    async with session(headers) as opened, opened.request(method, url, json=body, allow_redirects=False) as response:
        await check_status(response)
        return (await _body(response, BODY_BYTES)).decode("utf-8", "replace")


async def read_json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON object of an answer that is not streamed."""
    return parsed(await _body(response, BODY_BYTES))


async def check_status(response: aiohttp.ClientResponse) -> None:
    """Raise Failed for a status other than 200, with the server's reason, and for a compressed body."""
    if 300 <= response.status < 400:
        raise StatusError(response.status, "redirects are not followed")
    if response.status != 200:
        body = await _body(response, ERROR_BYTES, cut=True)
        raise StatusError(response.status, message_of(body.decode("utf-8", "replace")))
    if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise Failed(f"the server sent Content-Encoding {one_line(coding, 40)}, which was not accepted")


async def events(response: aiohttp.ClientResponse, most_bytes: int) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to [DONE] or the end of the stream.

    Raises Failed for a line that is too long, for more than `most_bytes` bytes, and for events after [DONE].
    """
    if response.content_type != "text/event-stream":
        raise Failed(f"the answer is {one_line(response.content_type, 40)} instead of text/event-stream")
    data: list[bytes] = []
    received = 0
    async for line in _lines(response):
        received += len(line)
        if received > most_bytes:
            raise Failed(f"the stream has more than {most_bytes} bytes")
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif not line and data:
            event = b"\n".join(data)
            data = []
            if event == DONE:
                await _finish(response)
                return
            yield event
    if data and data != [DONE]:
        yield b"\n".join(data)


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read the end of the answer after [DONE]. A server that sends none only loses the connection."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            async for line in _lines(response):
                if line.startswith(b"data:") and line[5:].strip() != DONE:
                    raise Failed("the stream continues after [DONE]")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for line in response.content:
            yield line
    except (LineTooLong, ValueError):  # ValueError before aiohttp 3.14
        most = response.content.get_read_buffer_limits()[1]
        raise Failed(f"the stream has a line of more than {most} bytes") from None


async def _body(response: aiohttp.ClientResponse, most_bytes: int, *, cut: bool = False) -> bytes:
    """The body; if it is longer, its beginning (`cut`), or Failed."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            if not cut:
                raise Failed(f"the answer has more than {most_bytes} bytes")
            break
    return bytes(body[:most_bytes])


def parsed(data: bytes | str) -> dict[str, Any]:
    """The JSON object in `data`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise Failed("the stream has a line that is not JSON") from None
    if not isinstance(value, dict):
        raise Failed("the stream has JSON that is not an object")
    return value


def message_of(text: str) -> str:
    """The message of a server's error, in one line."""
    with suppress(ValueError, RecursionError, AttributeError):
        body = json.loads(text)
        error = body.get("error", body)
        found = error.get("message") or error if isinstance(error, dict) else error
        text = found if isinstance(found, str) else json.dumps(found)
    return one_line(text, MESSAGE_LENGTH) or "no reason given"


def one_line(text: str, most: int) -> str:
    """Text of a server as part of a message: one line of at most `most` printable characters, shortened if longer."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 8 * most]).split())
    return line if len(line) <= most else f"{line[: most - 3].rsplit(' ', 1)[0]}..."


def describe(error: BaseException) -> str:
    """The reason of a failed request, in one line."""
    if isinstance(error, Failed):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    if isinstance(error, Unanswered):
        return "the server closed the connection before it answered"
    if isinstance(error, _BROKEN) or type(error) is aiohttp.ClientOSError:  # a subclass: never connected
        return f"the connection broke before the answer ended ({type(error).__name__})"
    return f"{type(error).__name__}: {message_of(str(error))}"
