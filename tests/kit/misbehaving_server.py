"""An HTTP server on loopback that sends any bytes with any delays. Each connection ends after a few seconds."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 3.0  # of a connection
LIMIT_BYTES = 2**26

Step = bytes | float | Callable[[socket.socket], None]  # bytes to send, seconds to wait, or what to do
TOY = {"object": "list", "data": [{"id": "org/toy", "owned_by": "test", "max_model_len": 512}]}


def head(status: str = "200 OK", kind: str = "text/event-stream", *more: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Connection: close", *more)
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(
    text: str | None = "a ", *, tokens: int | None = None, reason: str | None = None, prompt: int = 3, **usage: Any
) -> dict[str, Any]:
    """A chunk of a completion; without `text` only usage."""
    found: dict[str, Any] = {"choices": [] if text is None else [{"index": 0, "text": text, "finish_reason": reason}]}
    if tokens is not None:
        found["usage"] = {"prompt_tokens": prompt, "completion_tokens": tokens, **usage}
    return found


def good_stream(count: int = 4) -> list[bytes]:
    """The events of a valid answer of `count` tokens to a prompt of 3."""
    chunks = [chunk(tokens=n, reason="length" if n == count else None) for n in range(1, count + 1)]
    return [*map(event, chunks), event(chunk(None, tokens=count)), event(b"[DONE]")]


def reset(connection: socket.socket) -> None:
    """Close the connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def endless(data: bytes, gap_s: float = 0.0) -> Step:
    """Send `data` again and again until the client has enough."""

    def send(connection: socket.socket) -> None:
        stop, sent = time.monotonic() + LIMIT_S, 0
        while time.monotonic() < stop and sent < LIMIT_BYTES:
            connection.sendall(data)
            sent += len(data)
            time.sleep(gap_s)

    return send


def dripping(data: bytes, gap_s: float) -> list[Step]:
    """Send `data` byte by byte."""
    return [step for byte in data for step in (bytes([byte]), gap_s)]


@dataclass
class Misbehaviour:
    """What the server sends, by path: None for the right answer of /v1/models and 404 of other paths."""

    completion: list[Step] = field(default_factory=list)
    models: list[Step] | None = None
    metrics: list[Step] | None = None
    requests: int = 0  # of completions, so far

    def steps(self, path: str) -> list[Step]:
        if path == "/v1/completions":
            self.requests += 1
            return self.completion
        given = {"/v1/models": self.models, "/metrics": self.metrics}.get(path)
        if given is not None:
            return given
        if path == "/v1/models":
            return [head("200 OK", "application/json"), json.dumps(TOY).encode()]
        return [head("404 Not Found", "application/json"), b"{}"]


@contextmanager
def misbehaving(script: Misbehaviour) -> Iterator[str]:
    """The server's address. `script` may be changed between requests."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connection: socket.socket = self.request
            connection.settimeout(LIMIT_S)
            stop = time.monotonic() + LIMIT_S
            with contextlib.suppress(OSError, ValueError):
                for step in script.steps(_read_request(connection)):
                    if time.monotonic() > stop:
                        return
                    if isinstance(step, bytes):
                        connection.sendall(step)
                    elif callable(step):
                        step(connection)
                    else:
                        time.sleep(step)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        allow_reuse_address = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _read_request(connection: socket.socket) -> str:
    """Read a request with its body and return its path."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += (new := connection.recv(65536))
        if not new:
            raise ValueError("no request")
    text, _, body = data.partition(b"\r\n\r\n")
    lines = text.decode("latin-1").lower().split("\r\n")
    length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return lines[0].split()[1]
