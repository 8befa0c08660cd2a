"""A small OpenAI-compatible server on loopback, whose delays, counts and failures are known."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from local_server import NOT_FOUND, QuietHandler, listening

Broken = dict[str, Any]  # status and message, or where a stream breaks


@dataclass
class Script:
    """What the server does. A request's number counts from 0, over all of them."""

    first_s: float = 0.0
    gap_s: float = 0.0  # before each later piece
    piece: int = 1  # tokens of each piece
    usage: str = "every"  # or "last", "never"
    model: str = "org/toy"
    tokens: int | None = None  # of an answer; None: as many as requested
    text: Callable[[int], str] = lambda token: "abc "[token % 4]
    end: bool = False  # an end token without text, which usage counts only at the end
    fails: Callable[[int], Broken | None] = lambda number: None
    metrics: Callable[[Script], str] | None = None  # text of /metrics
    empties: str | None = "/flush_cache"
    extra_prompt_tokens: int = 0
    models: list[dict[str, Any]] | None = None
    key: str | None = None  # of GET requests
    about: dict[str, str] = field(default_factory=dict)  # text of other endpoints

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)  # requests before each emptying
    running: int = 0
    most_running: int = 0
    answered: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The server's address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if script.key is not None and self.headers["Authorization"] != f"Bearer {script.key}":
                self.send_text(401, '{"error":"Unauthorized"}')
            elif self.path == "/v1/models":
                self.send_text(200, json.dumps({"data": script.models or [{"id": script.model, "max_model_len": 512}]}))
            elif self.path == "/metrics" and script.metrics is not None:
                self.send_text(200, script.metrics(script))
            elif self.path in script.about:
                self.send_text(200, script.about[self.path])
            else:
                self.send_text(*NOT_FOUND)

        def do_POST(self) -> None:
            body = self.body()
            if self.path == script.empties:
                script.emptied.append(len(script.bodies))
                self.send_text(200, "")
            elif self.path == "/v1/completions":
                self._complete(json.loads(body))
            else:
                self.send_text(*NOT_FOUND)

        def _complete(self, body: dict[str, Any]) -> None:
            with script.lock:
                number = len(script.bodies)
                script.bodies.append(body)
                script.headers.append(dict(self.headers))
                script.came.append(time.perf_counter())
                script.running += 1
                script.most_running = max(script.most_running, script.running)
            broken = script.fails(number)
            if broken and "status" in broken:
                self.send_text(broken["status"], json.dumps({"error": {"message": broken["message"]}}))
            else:
                self._stream(body, broken or {})
            with script.lock:
                script.running -= 1

        def _stream(self, body: dict[str, Any], broken: Broken) -> None:
            self.begin_events()
            count = min(script.tokens or body["max_tokens"], body["max_tokens"])
            shown = count - script.end
            reason = "length" if count == body["max_tokens"] and not script.end else "stop"
            prompt = len(body["prompt"]) + script.extra_prompt_tokens
            used = {"prompt_tokens": prompt, "completion_tokens": 0}
            self.send_event({"choices": [{"text": "", "finish_reason": None}]})  # some servers open with nothing
            sent = 0
            while sent < shown:
                time.sleep(script.gap_s if sent else script.first_s)
                now = range(sent, min(sent + script.piece, shown))
                sent = now.stop
                if broken.get("after", shown + 1) <= sent:
                    if "body" in broken:
                        self.wfile.write(broken["body"].encode())
                    return
                piece: dict[str, Any] = {"choices": [{"text": "".join(map(script.text, now)), "finish_reason": None}]}
                if script.usage == "every":
                    piece["usage"] = used | {"completion_tokens": sent}
                if sent == count:
                    piece["choices"][0]["finish_reason"] = reason
                self.send_event(piece)
            if script.end:
                time.sleep(script.gap_s)
                self.send_event({"choices": [{"text": "", "finish_reason": reason}]})
            with script.lock:
                script.answered += count
            if script.usage != "never":
                self.send_event({"choices": [], "usage": used | {"completion_tokens": count}})
            self.send_event("[DONE]")

    with listening(Handler) as address:
        yield address
