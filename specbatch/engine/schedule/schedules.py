"""Spec v1 and spec v2: two orders of the same three operations, prefill, decode and handle.

Tokens and acceptance are the same by construction. v1 waits for the result of step n before it plans step n + 1. v2
plans and launches step n + 1 from upper bounds while n runs, and handles n one step late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from specbatch.engine.schedule.launched import Launched
from specbatch.engine.schedule.runner import Runner
from specbatch.engine.schedule.scheduler import OutOfPagesError


class Schedule(Protocol):
    def step(self) -> bool:
        """Advance all requests by one decode step; false if there was nothing to do."""
        ...

    def drop(self) -> None:
        """Forget results in flight."""


class Synchronous:
    """v1: draft, verify, wait."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def step(self) -> bool:
        runner = self._runner
        before = runner.counters.prefill_passes
        first = runner.prefill()
        if first is not None:
            runner.handle(first)
        result = runner.decode(may_retract=True)
        if result is not None:
            runner.handle(result)
        return result is not None or runner.counters.prefill_passes > before

    def drop(self) -> None:
        pass


class Overlapped:
    """v2: the device never waits for the host while there is work for it; results are handled one step late.

    If the result in flight is expected to end all requests, it is handled first: the next step would compute nothing
    that is needed, and the prompts of waiting requests would run after it. A wrong expectation costs a wait, and
    changes no token. While a request has a grammar on the host, which needs its tokens, all results are handled first,
    as in v1.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._in_flight: Launched | None = None

    def step(self) -> bool:
        runner, previous = self._runner, self._in_flight
        before = runner.counters.prefill_passes
        late = previous is not None
        first = runner.prefill()
        if first is not None and first.ready():
            runner.handle(first)
            first = None
        waits = runner.scheduler.matched_on_host > 0
        if previous is not None and (waits or runner.scheduler.expects_all_to_end()):
            runner.handle(previous)
            previous = None
        if first is not None and waits:
            runner.handle(first)
            first = None
        try:
            self._in_flight = runner.decode(may_retract=previous is None)
        except OutOfPagesError:
            # The result in flight may end requests and free their pages: handle it before retracting a request.
            assert previous is not None
            runner.handle(previous)
            previous = None
            self._in_flight = runner.decode(may_retract=True)
        if previous is not None:
            runner.handle(previous, overlapped=self._in_flight is not None)
        if first is not None:  # waits for the prefill only, while the decode step after it runs
            runner.handle(first)
        return late or self._in_flight is not None or runner.counters.prefill_passes > before

    def drop(self) -> None:
        self._in_flight = None


SCHEDULES: dict[str, Callable[[Runner], Schedule]] = {"v1": Synchronous, "v2": Overlapped}
