"""HTTP servers on loopback, in a thread: what all stub servers of other engines share."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOT_FOUND = 404, '{"detail":"Not Found"}'


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing."""

    def send_text(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()

    def send_event(self, event: dict[str, Any] | str) -> None:
        """A JSON object, or "[DONE]"."""
        text = event if isinstance(event, str) else json.dumps(event)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def body(self) -> str:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def listening(handler: type[QuietHandler]) -> Iterator[str]:
    """The server's address."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None: ...  # a client that hung up

    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
