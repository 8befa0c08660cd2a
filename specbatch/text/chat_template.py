"""Chat templates of checkpoints: Jinja programs, rendered in a sandbox in a process with limits.

A template is code from a checkpoint. The sandbox keeps it from Python's objects, and the process bounds its CPU time,
memory and output, so that a template that never ends costs seconds and not the job. See
`specbatch.text.template_worker`.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.text import template_worker
from specbatch.text.template_worker import FAILED, MEMORY_EXCEEDED, REFUSED, TEMPLATE_ERROR

LONGEST = 1 << 20  # characters of a template
CPU_SECONDS = 3.0  # for a rendering
MEMORY = 512 << 20  # bytes of address space of the process
LONGEST_OUTPUT = 64 << 20  # bytes
AHEAD = 256 << 10  # bytes of variables that are rendered together
CHANCES = 8  # renderings that may exceed a limit, of a template that has rendered nothing yet
_REASONING = ("reasoning_content", "thinking", "reasoning")

_Process = subprocess.Popen[bytes]


class TemplateRefusal(SpecbatchError):
    """A template does not take some messages: it raised an error itself, or has one of Jinja's errors with them."""


class ChatTemplate:
    """A chat template. Its process starts with the first rendering, and again after one that exceeded a limit.

    source  the template
    name    of the model, for error messages
    """

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self.name = name
        self._lock = threading.Lock()
        self.process: _Process | None = None
        self._owner = 0  # the process id that started it; a fork must not share its pipes
        self._exceeded = 0
        self._rendered = False  # a text, once
        self._failure: str | None = None
        self._ahead: dict[bytes, tuple[int, str]] = {}  # replies by variables

    def render(self, **variables: Any) -> str:
        """The text for these variables, which are lists, dicts with string keys, strings, numbers, booleans or None.

        Raises SpecbatchError if the template is not valid or exceeds a limit, and TemplateRefusal if it raises an
        error for these variables.
        """
        try:
            request = _packed(variables)
        except ValueError as error:
            works = f"use lists, dicts, strings and numbers ({error})"
            raise refuse("messages", variables.get("messages"), works) from None
        with self._lock:
            if self._failure is None and not self._runs:
                self._start()
            if self._failure is not None:
                raise refuse("chat_template", self.name, self._failure)
            kind, text = self._ahead.get(request) or self._ask(marshal.dumps([request]))
        if kind in (REFUSED, TEMPLATE_ERROR, FAILED):
            works = f"it has an error, which may show with some messages only ({text}); correct it, or use another"
            if kind == REFUSED:
                works = f"it does not accept these messages ({text})"
            found = refuse("chat_template", self.name, works)
            if kind == FAILED:
                raise found
            raise TemplateRefusal(str(found), setting=found.setting, value=found.value, works=found.works)
        self._rendered = True
        return text

    def render_ahead(self, several: Iterable[dict[str, Any]]) -> None:
        """Render for several sets of variables in one exchange with the process, which takes longer than a usual
        rendering. `render` then returns the replies; what this leaves out, or what exceeds a limit, it asks for alone.

        Each call forgets the replies of the one before.
        """
        with self._lock:
            self._ahead.clear()
            process = self.process
            if not self._rendered or process is None or not self._runs:
                return
            requests, size = [], 0
            for variables in several:
                with suppress(ValueError):
                    requests.append(_packed(variables))
                    size += len(requests[-1])
                if size > AHEAD:
                    break
            try:
                replies = exchange(process, marshal.dumps(requests), len(requests))
            except BaseException:  # Ctrl-C, as in `_ask`
                self._close(process)
                raise
            whole = [reply for reply in replies if reply[0] != MEMORY_EXCEEDED]
            if len(whole) < len(requests):
                self._close(process)
            if len(whole) == len(replies):
                self._ahead = dict(zip(requests, replies, strict=False))

    @property
    def _runs(self) -> bool:
        return self.process is not None and self._owner == os.getpid()

    def _start(self) -> None:
        if len(self.source) > LONGEST:
            self._failure = f"it has {len(self.source):,} characters; a template has at most {LONGEST:,}"
            return
        self.process = subprocess.Popen(
            [sys.executable, "-P", template_worker.__file__, *map(str, (CPU_SECONDS, MEMORY, LONGEST_OUTPUT))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for this process only
        )
        self._owner = os.getpid()
        weakref.finalize(self, _stop, self.process, self._owner)
        kind, text = self._ask(self.source.encode(errors="surrogatepass"))
        if kind in (FAILED, TEMPLATE_ERROR):
            self._failure = f"it cannot be read ({text}); correct it, or use another"

    def _ask(self, request: bytes) -> tuple[int, str]:
        """The kind and the text of the reply. Raises SpecbatchError if there is none because of a limit."""
        process = self.process
        assert process is not None
        try:
            replies = exchange(process, request)
        except BaseException:  # Ctrl-C: the reply would be taken for that of the next request
            self._close(process)
            raise
        if replies and replies[0][0] != MEMORY_EXCEEDED:
            return replies[0]
        self._close(process)
        self._exceeded += 1
        works = f"it {_excess(None if replies else process.returncode)}"
        if self._exceeded >= CHANCES and not self._rendered:
            self._failure = f"{works}, nor for {CHANCES - 1} others; use another template, or chat_template=False"
        raise refuse("chat_template", self.name, works)

    def _close(self, process: _Process) -> None:
        _stop(process, self._owner)
        self.process = None


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read, whichever of them it has: as in transformers
    5.23, where `reasoning_content` replaces `thinking`, which replaces `reasoning`."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def with_argument_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages whose tool calls have their arguments as JSON, as the templates of DeepSeek-V3 read them; None if there
    are no such calls."""
    if not any(message.get("tool_calls") for message in messages):
        return None

    def with_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": text}}

    return [
        message | {"tool_calls": [with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _packed(variables: dict[str, Any]) -> bytes:
    """Equal bytes for equal variables: later versions of the format depend on the number of references."""
    return marshal.dumps(variables, 2)


def exchange(process: _Process, request: bytes, count: int = 1) -> list[tuple[int, str]]:
    """Send a request and return the kind and text of its replies, fewer than `count` if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    replies: list[tuple[int, str]] = []
    try:
        process.stdin.write(len(request).to_bytes(8, "little") + request)
        process.stdin.flush()
    except BrokenPipeError:
        return replies
    while len(replies) < count:
        header = process.stdout.read(9)
        size = int.from_bytes(header[:8], "little")
        text = process.stdout.read(size)
        if len(header) < 9 or len(text) < size:
            break
        replies.append((header[8], text.decode()))
    return replies


def _stop(process: _Process, owner: int) -> None:
    """End a process, if this one started it."""
    if owner != os.getpid():
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # closing sends what is left of a request
            pipe.close()


def _excess(status: int | None) -> str:
    """What a template did, by the exit status of its process; None: it reported that its memory was exhausted."""
    if status == -signal.SIGPROF:
        return f"needs more than {CPU_SECONDS:g} seconds for these messages"
    if status is None:
        return f"needs more than {MEMORY >> 20} MiB for these messages"
    return f"ended its process (status {status})"
