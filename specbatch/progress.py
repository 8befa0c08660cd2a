"""Progress on standard error: a bar with the remaining time or, without a terminal, one line per minute."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from specbatch.point_times import MARGINAL, PointTimes, PointWork

Report = Callable[[int, int], None]  # (done, total)
Work = tuple[float, float]  # done and total, in a unit that always takes about as long
SECONDS_BETWEEN_LINES = 60.0
LONG = 600.0  # seconds that are shown as minutes
SECONDS_OF_SPEED = 10.0
SECONDS_OF_ESTIMATE = 0.2  # between estimates of the remaining time, which must not slow down what is measured


class NotedReport(Protocol):
    """A `Report` with an optional note, such as a speed, and with the work where items differ in it: the remaining time
    follows from the work."""

    def __call__(self, done: int, total: int, note: str = "", /, *, work: Work | None = None) -> None: ...


def begin_phase(report: Report, name: str) -> None:
    """Name what is reported from now on, such as "recording graphs", if the report is one of `progress`."""
    begin = getattr(report, "phase", None)
    if begin is not None:
        begin(name)


class Instead:
    """`call` in place of `report`, which still shows the phases."""

    def __init__(self, report: Report, call: Report) -> None:
        self._report, self._call = report, call

    def __call__(self, done: int, total: int) -> None:
        self._call(done, total)

    def phase(self, name: str) -> None:
        begin_phase(self._report, name)


class Waves:
    """Progress of the points of a sweep or an evaluation, in requests. The remaining time is the sum of what each point
    is expected to take (`PointTimes`).

    requests   of each point that is left, as in `PointWork`, in the order in which they run
    marginal   see `PointTimes`
    workers    that run points at the same time
    """

    def __init__(
        self,
        report: NotedReport | None,
        requests: Iterable[tuple[int, int] | tuple[int, int, str]] = (),
        *,
        marginal: float = MARGINAL,
        workers: int = 1,
    ) -> None:
        self._report, self._workers = report, workers
        self._times = PointTimes(marginal)
        self._left: list[PointWork] = []
        self._done, self._total, self._of_point = 0, 0, 0
        self._start = self._point_start = time.monotonic()
        self._estimated, self._end = -math.inf, 0.0  # when the end was estimated, and the estimate
        self.expect(requests)

    def expect(self, requests: Iterable[tuple[int, int] | tuple[int, int, str]]) -> None:
        """Add points, as `requests` of the constructor."""
        points = [PointWork(*point) for point in requests]
        self._left += points
        self._total += sum(point.requests for point in points)

    def begin(self) -> None:
        """Begin to measure the current point: the time since the end of the one before, as of a warm-up, is not its
        own."""
        self._point_start = time.monotonic()

    def add(self, concurrency: int, requests: int = 1, name: str = "") -> None:
        """Count requests of the current point as done."""
        self._of_point += requests
        self._done += requests
        if self._report is None:
            return
        now = time.monotonic()
        if now - self._estimated >= SECONDS_OF_ESTIMATE:
            self._estimated, self._end = now, now + self._rest(concurrency, name)
        self._report(self._done, self._total, work=(now - self._start, max(self._end, now) - self._start))

    def finish(self, requests: int, concurrency: int, name: str = "", seconds: float | None = None) -> None:
        """End the current point. Requests that it did not run, as after an error, are no longer counted.

        seconds: that its requests took; None: since the end of the one before
        """
        now, point = time.monotonic(), PointWork(requests, concurrency, name)
        done, self._of_point = self._of_point, 0
        self._total -= requests - done
        if done:
            self._times.add(point._replace(requests=done), now - self._point_start if seconds is None else seconds)
        self._point_start = now
        if point in self._left:
            self._left.remove(point)

    def _rest(self, concurrency: int, name: str) -> float:
        """Seconds until all points are finished."""
        current = next((point for point in self._left if point[1:] == (concurrency, name)), None)
        others = list(self._left)
        rest, passed, done = 0.0, time.monotonic() - self._point_start, self._of_point
        times = self._times
        if current is not None:
            others.remove(current)
            known, at_this_rate = times.expected(name, concurrency), (current.requests - done) * passed / done
            if known is None or done >= concurrency:  # a whole wave shows how fast it is
                rest = at_this_rate
            elif passed < (whole := known * current.requests):
                rest = whole - passed
            else:
                rest = min(at_this_rate, passed)
            times = times.having(current, passed + rest)
        for point in others:
            rest += point.requests * (times.expected(point.name, point.concurrency) or 0.0)
        return rest / self._workers


class Stages:
    """One progress of stages that follow each other, each of which is known when it begins. A call reports that of the
    current stage."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._before = self._total = 0

    def begin(self, name: str) -> None:
        """Begin another stage, which is also a phase."""
        self._before, self._total = self._before + self._total, 0
        begin_phase(self._report, name)

    def __call__(self, done: int, total: int) -> None:
        self._total = total
        self._report(self._before + done, self._before + total)


@contextmanager
def progress(label: str, unit: str, done: int = 0) -> Iterator[NotedReport]:
    """Yield a function to call with (done, total), as often as needed. Shown are done / total, the rate, the time that
    has passed and the time that is left. Rate and remaining time are of what is done after the first call, so that they
    leave out what came before it, such as loading a model.

    unit   what is counted, such as "requests"
    done   what an earlier run had finished
    """
    if not sys.stderr.isatty():
        yield _Lines(label, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),  # the line fits in 80 columns
        TextColumn("{task.fields[count]}"),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, completed=done, count="", left="", note="")
        yield _Bar(label, unit, partial(bar.update, task))


class _Pace:
    """How fast something advances after the first report, or after one that counts from the start again."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._first: tuple[int, float, float] | None = None  # done, its work, when
        self._last = 0, 0.0

    def __call__(self, done: int, total: int, work: Work | None = None) -> tuple[str, str]:
        """("23/72 requests, 0.37/s", "about 132 s left"); without a rate and empty until more is done."""
        now = time.monotonic()
        worked, all_work = work or (done, total)
        if self._first is None or done < self._last[0] or worked < self._last[1]:
            self._first = done, worked, now
        self._last = done, worked
        before, worked_before, start = self._first
        count, passed, new = f"{done}/{total} {self._unit}", now - start, done - before
        if new <= 0 or passed <= 0:
            return count, ""
        rest = passed / (worked - worked_before) * (all_work - worked)
        left = f"about {rest:.0f} s left" if rest < LONG else f"about {rest / 60:.0f} min left"
        return f"{count}, {new / passed:.3g}/s", left if done < total else ""


class Speed:
    """The speed of a token stream: tokens per second over the last 10 seconds, and the number of running requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._tokens = 0  # in `_recent`
        self._running: set[int] = set()

    def add(self, index: int, tokens: int, *, ended: bool) -> None:
        """Count new tokens of request `index`."""
        now = self._clock()
        if self._recent and now - self._recent[-1][0] < SECONDS_OF_SPEED / 100:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + tokens)
        else:
            self._recent.append((now, tokens))
            self._forget(now)
        self._tokens += tokens
        (self._running.discard if ended else self._running.add)(index)

    def __str__(self) -> str:
        now = self._clock()
        since = max(self._start, now - SECONDS_OF_SPEED)
        self._forget(now)
        rate = self._tokens / (now - since) if now > since else 0.0
        return f"{rate:.0f} tok/s, {len(self._running)} running"

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - SECONDS_OF_SPEED:
            self._tokens -= self._recent.popleft()[1]


class _Shown:
    """Progress with a label, which is the name of the phase if there is one, and a rate, which is that of the phase."""

    def __init__(self, label: str, unit: str) -> None:
        self._label, self._unit, self._pace = label, unit, _Pace(unit)

    def phase(self, name: str) -> None:
        self._label, self._pace = name, _Pace(self._unit)


class _Bar(_Shown):
    def __init__(self, label: str, unit: str, update: Callable[..., Any]) -> None:
        super().__init__(label, unit)
        self._update = update

    def phase(self, name: str) -> None:
        super().phase(name)
        self._update(description=self._label)

    def __call__(self, done: int, total: int, note: str = "", *, work: Work | None = None) -> None:
        count, left = self._pace(done, total, work)
        self._update(completed=done, total=total, count=count, left=left, note=note)


class _Lines(_Shown):
    def __init__(self, label: str, unit: str) -> None:
        super().__init__(label, unit)
        self._start = self._last = time.monotonic()

    def __call__(self, done: int, total: int, note: str = "", *, work: Work | None = None) -> None:
        now = time.monotonic()
        count, left = self._pace(done, total, work)
        if now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        parts = filter(None, (count, f"{now - self._start:.0f} s elapsed", left, note))
        print(f"{self._label}: {', '.join(parts)}", file=sys.stderr, flush=True)
