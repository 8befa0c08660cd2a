"""One replica of a data-parallel engine: carries out the commands of the engine that leads it."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue

from specbatch.engine.engine import Engine
from specbatch.engine.requests.submissions import SubmissionQueue
from specbatch.errors import ShortOfMemoryError, SpecbatchError
from specbatch.replicas.messages import (
    Abort,
    Alive,
    Begin,
    Build,
    Built,
    Call,
    Close,
    Command,
    Completed,
    End,
    Ended,
    Log,
    Message,
    Progress,
    Refused,
    Returned,
    Shrunk,
    Submit,
)

ALIVE_S = 5.0  # between signs of life


class _Stream:
    """An open stream, as the thread that receives commands sees it."""

    def __init__(self) -> None:
        self.queue = SubmissionQueue()
        self.aborts: deque[int | str] = deque()
        self.dropped = False


class Replica:
    """Engines over one copy of the weights. `run` works; another thread passes commands to `receive` meanwhile."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._commands: SimpleQueue[tuple[Command, _Stream | None]] = SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._engines: dict[int, Engine] = {}

    def receive(self, command: Command) -> None:
        """Take a command. Those of an open stream take effect while it runs, the others one after the other."""
        match command:
            case Submit(number, items):
                now = time.perf_counter()
                self._streams[number].queue.put([(item, now - waited) for item, waited in items])
            case Abort(number, name):
                self._streams[number].aborts.append(name)
            case End(number, drop):
                stream = self._streams.pop(number)
                stream.dropped = drop
                stream.queue.close(drop=drop)
            case Begin(number):
                self._streams[number] = _Stream()
                self._commands.put((command, self._streams[number]))
            case _:
                self._commands.put((command, None))

    def run(self) -> None:
        """Carry out commands forever. Returns after an error, which the last message names."""
        try:
            while True:
                self._carry_out(*self._commands.get())
        except ShortOfMemoryError as error:
            self._send(Ended(str(error), smaller=error.smaller))
        except Exception as error:
            self._send(Ended(_one_line(error), traceback.format_exc()))

    def _carry_out(self, command: Command, stream: _Stream | None) -> None:
        try:
            match command:
                case Build():
                    self._build(command)
                case Close(number) if number in self._engines:  # else it was refused
                    self._engines.pop(number).close()
                case Begin(number, engine):
                    assert stream is not None
                    self._run(number, stream, self._engines[engine])
                case Call(ticket, engine, "score", arguments):
                    beat = self._beat()
                    found = self._engines[engine].score(**arguments, on_score=lambda index, likelihood: beat())
                    self._send(Returned(ticket, found))
                case Call(ticket, engine, method, arguments):
                    self._send(Returned(ticket, getattr(self._engines[engine], method)(**arguments)))
        except SpecbatchError as error:
            if not isinstance(command, Build | Call):
                raise
            self._send(Refused(error, command.engine, command.ticket if isinstance(command, Call) else None))

    def _build(self, command: Build) -> None:
        engine = self._engines[command.engine] = Engine(
            command.config,
            log=lambda line: self._send(Log(command.engine, line)),
            report=lambda done, total: self._send(Progress(done, total)),
            weights_of=None if command.weights_of is None else self._engines[command.weights_of],
            share=command.share,
        )
        engine.on_shrink = lambda line: self._send(Shrunk(command.engine, line))
        self._send(Built(command.engine, engine.config, engine.caps))

    def _run(self, number: int, stream: _Stream, engine: Engine) -> None:
        beat = self._beat()
        with closing(engine.serve(stream.queue)) as events:
            for event in events:
                if stream.dropped:
                    return
                beat()
                while stream.aborts:
                    engine.abort(stream.aborts.popleft())
                if event.completion is not None:
                    self._send(Completed(number, replace(event.completion, prompt_token_ids=[])))

    def _beat(self) -> Callable[[], None]:
        """A function to call whenever the work goes on: it sends a sign of life now and then."""
        heard = time.monotonic()

        def beat() -> None:
            nonlocal heard
            if time.monotonic() - heard > ALIVE_S:
                self._send(Alive())
                heard = time.monotonic()

        return beat


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
