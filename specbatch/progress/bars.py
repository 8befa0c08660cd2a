"""Progress on standard error: a bar with the remaining time or, without a terminal, one line per minute."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from specbatch.progress.point_times import MARGINAL, PointTimes, PointWork

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Report = Callable[[int, int], None]  # (done, total); total 0: it is not known
Work = tuple[float, float]  # done and total, in a unit that always takes about as long
SECONDS_BETWEEN_LINES = 60.0
SECONDS_OF_SILENCE = 0.5  # before the first line of a phase whose total is not known, which may end soon
LONG = 120.0  # seconds that are shown as minutes
SECONDS_OF_SPEED = 10.0
SECONDS_WITHOUT_REPORT = 1.0  # after which the speed of prefill is shown
SECONDS_OF_ESTIMATE = 0.2  # between estimates of the remaining time, which must not slow down what is measured
_BAR = 10  # columns


def time_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if round(seconds) < LONG else f"{seconds / 60:.0f} min"


class NotedReport(Protocol):
    """A `Report` with an optional note, such as a speed, and with the work where items differ in it: the remaining time
    follows from the work.

    note   parts separated by ", ", the most important one first: those that do not fit on a line are left out
    """

    def __call__(self, done: int, total: int, note: str = "", /, *, work: Work | None = None) -> None: ...

    def prefilled(self, tokens: int) -> None:
        """Count prompt tokens that were computed. Their speed is shown while nothing else is reported."""


def begin_phase(report: Report, name: str) -> None:
    """Name what is reported from now on, such as "recording graphs", if the report is one of `progress`."""
    begin = getattr(report, "phase", None)
    if begin is not None:
        begin(name)


@contextmanager
def phase(report: NotedReport | None, name: str) -> Iterator[NotedReport | None]:
    """Name what is reported inside, and go on with the name before."""
    if report is not None:
        before = getattr(report, "label", "")
        begin_phase(report, name)
    yield report
    if report is not None and before:
        begin_phase(report, before)


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

    def phase(self, name: str) -> AbstractContextManager[NotedReport | None]:
        """See `phase`."""
        return phase(self._report, name)

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
    from rich.live import Live

    shown = _Bar(label, unit, done)
    with Live(shown, console=Console(stderr=True), refresh_per_second=10, transient=True):
        yield shown


class _Pace:
    """How fast something advances after the first report, or after one that counts from the start again."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._first: tuple[int, float, float] | None = None  # done, its work, when
        self._last = 0, 0.0

    def __call__(self, done: int, total: int, work: Work | None = None) -> tuple[str, str, str]:
        """("23/72 requests", "0.37/s", "about 132 s left"); the last two are empty until more is done."""
        now = time.monotonic()
        worked, all_work = work or (done, total)
        if self._first is None or done < self._last[0] or worked < self._last[1]:
            self._first = done, worked, now
        self._last = done, worked
        before, worked_before, start = self._first
        of_total = f"/{total}" if total else ""
        count, passed, new = f"{done}{of_total} {self._unit}", now - start, done - before
        if new <= 0 or passed <= 0:
            return count, "", ""
        rest = passed / (worked - worked_before) * (all_work - worked)
        left = f"about {time_text(rest)} left"
        return count, f"{new / passed:.3g}/s", left if done < total else ""


class Rate:
    """Tokens per second over the last 10 seconds."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._start = self._clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._tokens = 0  # in `_recent`

    def add(self, tokens: int) -> None:
        now = self._clock()
        if self._recent and now - self._recent[-1][0] < SECONDS_OF_SPEED / 100:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + tokens)
        else:
            self._recent.append((now, tokens))
            self._forget(now)
        self._tokens += tokens

    def __float__(self) -> float:
        now = self._clock()
        since = max(self._start, now - SECONDS_OF_SPEED)
        self._forget(now)
        return self._tokens / (now - since) if now > since else 0.0

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - SECONDS_OF_SPEED:
            self._tokens -= self._recent.popleft()[1]


class Speed:
    """The speed of a token stream, and the number of running requests."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._rate = Rate(clock)
        self._running: set[int] = set()

    def add(self, index: int, tokens: int, *, ended: bool) -> None:
        """Count new tokens of request `index`."""
        self._rate.add(tokens)
        (self._running.discard if ended else self._running.add)(index)

    def __str__(self) -> str:
        return f"{float(self._rate):.0f} tok/s, {len(self._running)} running"


class _Shown:
    """Progress with a label, which is the name of the phase if there is one, and a rate, which is that of the phase."""

    def __init__(self, label: str, unit: str) -> None:
        self.label, self._unit, self._pace = label, unit, _Pace(unit)
        self._count = self._rate = self._left = self._note = ""
        self._prefill = Rate()
        self._start = self._reported = time.monotonic()

    def phase(self, name: str) -> None:
        self.label, self._pace = name, _Pace(self._unit)
        self._count = self._rate = self._left = self._note = ""

    def prefilled(self, tokens: int) -> None:
        self._prefill.add(tokens)

    def __call__(self, done: int, total: int, note: str = "", *, work: Work | None = None) -> None:
        self._count, self._rate, self._left = self._pace(done, total, work)
        self._note, self._reported = note, time.monotonic()

    def _notes(self) -> list[str]:
        """The parts of the note. Prefill passes of long prompts end no request and emit no token: their speed is shown
        in its place."""
        prefill = float(self._prefill)
        if prefill >= 1 and time.monotonic() - self._reported >= SECONDS_WITHOUT_REPORT:
            return [f"{prefill:.0f} prompt tok/s"]
        return self._note.split(", ") if self._note else []


class _Bar(_Shown):
    """One line of a terminal, which rich renders again and again. Parts that do not fit are left out whole."""

    def __init__(self, label: str, unit: str, done: int) -> None:
        super().__init__(label, unit)
        self._done, self._total = done, float("nan")

    def phase(self, name: str) -> None:
        super().phase(name)
        self._total = float("nan")

    def __call__(self, done: int, total: int, note: str = "", *, work: Work | None = None) -> None:
        super().__call__(done, total, note, work=work)
        self._done, self._total = done, total

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Text(self._line(options.max_width))
        row = Table.grid(padding=(0, 1))
        if self._total > 0 and len(line) + _BAR + 1 <= options.max_width:
            row.add_row(ProgressBar(self._total, self._done, width=_BAR), line)
        else:
            row.add_row(line)
        yield row

    def _line(self, width: int) -> str:
        """The parts that fit into `width` columns, the important ones first."""
        passed = int(time.monotonic() - self._start)
        elapsed = f"{passed // 3600}:{passed // 60 % 60:02}:{passed % 60:02} elapsed"
        notes = self._notes()
        order = [self._count, self._rate, elapsed, self._left, *notes]
        label, chosen = "", list[str]()
        for part in (self._count, elapsed, self._left, self.label, *notes, self._rate):
            labelled = self.label if part is self.label else label
            longer = chosen if part is self.label else sorted(filter(None, [*chosen, part]), key=order.index)
            if len(f"{labelled} {', '.join(longer)}".strip()) <= width:
                label, chosen = labelled, longer
        return f"{label} {', '.join(chosen)}".strip()


class _Lines(_Shown):
    """A line per minute."""

    def __init__(self, label: str, unit: str) -> None:
        super().__init__(label, unit)
        self._last, self._printed = self._start, False

    def prefilled(self, tokens: int) -> None:
        super().prefilled(tokens)
        self._print(of_known=True)

    def __call__(self, done: int, total: int, note: str = "", *, work: Work | None = None) -> None:
        super().__call__(done, total, note, work=work)
        self._print(of_known=total > 0)

    def _print(self, *, of_known: bool) -> None:
        """of_known: whether the total is known. Else the first line comes early."""
        now = time.monotonic()
        if now - self._last < (SECONDS_BETWEEN_LINES if of_known or self._printed else SECONDS_OF_SILENCE):
            return
        self._last, self._printed = now, True
        passed = f"{now - self._start:.0f} s elapsed"
        parts = filter(None, (self._count, self._rate, passed, self._left, *self._notes()))
        print(f"{self.label}: {', '.join(parts)}", file=sys.stderr, flush=True)
