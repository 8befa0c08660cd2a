"""Progress lines: the recent speed, and a remaining time that ignores the work of earlier runs."""

from __future__ import annotations

import io
import re
import time

import pytest
from crossed import crossed

from specbatch.progress.bars import (
    SECONDS_BETWEEN_LINES,
    SECONDS_OF_SILENCE,
    SECONDS_OF_SPEED,
    Instead,
    Speed,
    Stages,
    Waves,
    phase,
    progress,
    time_text,
)
from specbatch.progress.point_times import MARGINAL, MARGINAL_ON_CPU


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (119.4, "119 s"), (119.7, "2 min"), (150, "2 min"), (591, "10 min")]
)
def test_minutes_from_two_minutes_on(seconds, text):
    assert time_text(seconds) == text


def test_speed_covers_the_last_seconds(clock):
    speed = Speed(clock)
    assert str(speed) == "0 tok/s, 0 running"
    for index in range(3):
        speed.add(index, 10, ended=False)
    clock.now += 2
    speed.add(0, 10, ended=True)
    assert str(speed) == "20 tok/s, 2 running"  # 40 in the 2 s there were
    clock.now += SECONDS_OF_SPEED
    assert str(speed) == f"{10 / SECONDS_OF_SPEED:.0f} tok/s, 2 running"  # the first 30 are older
    clock.now += 0.1
    assert str(speed) == "0 tok/s, 2 running"
    speed.add(1, 5, ended=True)
    speed.add(2, 0, ended=True)
    assert str(speed).endswith("0 running")


def test_speed_of_a_long_run_needs_little_memory(clock):
    speed = Speed(clock)
    for step in range(100_000):
        clock.now += 0.01
        speed.add(step, 4, ended=True)
    assert len(speed._rate._recent) < 200
    assert 390 < float(str(speed).split()[0]) < 410


def test_without_a_terminal_there_is_one_line_per_minute(clock, capsys):
    with progress("work", "prompts", 40) as report:
        report(41, 100, "5 tok/s")
        clock.now += SECONDS_BETWEEN_LINES
        report(60, 100, "7 tok/s")
        report(61, 100)
        clock.now += SECONDS_BETWEEN_LINES - 1
        report(100, 100)
    assert capsys.readouterr().err == "work: 60/100 prompts, 0.317/s, 60 s elapsed, about 2 min left, 7 tok/s\n"


def test_unknown_total_has_a_line_soon(clock, capsys):
    """As a phase that begins without one looks like a command that hangs."""
    with progress("reading", "rows") as report:
        report(100, 0)
        clock.now += SECONDS_OF_SILENCE + 0.1
        report(300, 0)
        clock.now += SECONDS_BETWEEN_LINES - 1
        report(400, 0)
        clock.now += 2
        report(500, 0)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "reading: 300 rows, 333/s, 1 s elapsed"
    assert second.startswith("reading: 500 rows, ")


def test_time_before_the_first_report_is_in_no_rate(clock, capsys):
    with progress("sweep", "requests") as report:
        clock.now += SECONDS_BETWEEN_LINES - 2  # loads a model
        report(1, 41)
        clock.now += 2
        report(21, 41)
    assert capsys.readouterr().err == "sweep: 21/41 requests, 10/s, 60 s elapsed, about 2 s left\n"


def left_at(line):
    found = re.search(r"about (\d+) (s|min) left", line)
    return float(found[1]) * (60 if found[2] == "min" else 1)


SPEEDS = {  # seconds of a request by concurrency
    "saturated": lambda size: 0.2,
    "free batches": lambda size: 2.0 / size,
    "GPU": lambda size: 0.02 + 2.0 / size,
    "CPU": lambda size: 0.5 + 1.5 / size,
}


@pytest.mark.parametrize(
    ("sizes", "speed", "in_waves"),
    crossed([[1, 8, 32, 128], [1, 4], [1, 32], [32, 8, 1], [16]], SPEEDS, [False, True]),
    ids=str,
)
def test_remaining_time_of_a_sweep_is_right_from_a_third_on(clock, capsys, sizes, speed, in_waves):
    """Three configurations of different speeds, three rounds; a report for each request, or for all concurrent ones at
    once."""
    factors = {"baseline": 1.0, "v1": 0.7, "v2": 0.4}
    points = [(max(4, 4 * size), size, name) for size in sizes for _ in range(3) for name in factors]
    seconds = {point: point[0] * SPEEDS[speed](point[1]) * factors[point[2]] for point in points}
    whole, begun = sum(seconds[point] for point in points), clock.now
    stretch = 3000 / whole  # so that there are lines enough
    marginal = {"CPU": MARGINAL_ON_CPU, "saturated": 1.0}.get(speed, MARGINAL)
    with progress("sweep", "requests") as report:
        waves = Waves(report, points, marginal=marginal)
        for point in points:
            waves.begin()
            requests, size, name = point
            group = size if in_waves else 1
            for _ in range(requests // group):
                clock.now += stretch * seconds[point] * group / requests
                waves.add(size, group, name)
            waves.finish(*point)
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    checked = 0
    for line in lines:
        passed = float(re.search(r"(\d+) s elapsed", line)[1])
        rest = 3000 - passed
        if passed >= 1000 and rest > 120:  # later the rounding of minutes weighs more
            assert left_at(line) == pytest.approx(rest, rel=0.25, abs=35), line
            checked += 1
    assert checked >= 8
    assert clock.now - begun == pytest.approx(3000)


def test_remaining_time_leaves_out_warm_ups_and_what_failed(clock, capsys):
    with progress("sweep", "requests") as report:
        waves = Waves(report, [(4, 1, "a"), (128, 32, "a"), (64, 32, "b")])
        clock.now += 500  # loads and compiles
        waves.begin()
        for _ in range(4):
            clock.now += SECONDS_BETWEEN_LINES / 4
            waves.add(1, name="a")
        waves.finish(4, 1, "a")
        waves.finish(128, 32, "a")  # failed
        clock.now += 500
        waves.begin()
        for _ in range(32):
            clock.now += 2
            waves.add(32, name="b")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("sweep: 35/68 requests")
    assert left_at(lines[-1]) == pytest.approx(66, rel=0.1)


def test_remaining_time_of_several_workers(clock, capsys):
    with progress("sweep", "requests") as report:
        waves = Waves(report, [(8, 4, "a")] * 6, workers=2)
        for _ in range(2):
            clock.now += 100
            for _ in range(2):  # points of 100 s each, two at a time
                waves.add(4, 8, "a")
                waves.finish(8, 4, "a", seconds=100.0)
    assert left_at(capsys.readouterr().err.splitlines()[-1]) == pytest.approx(100, abs=51)


def test_points_can_follow(clock, capsys):
    with progress("sweep", "requests") as report:
        waves = Waves(report, [(4, 1)])
        for _ in range(2):
            for _ in range(4):
                clock.now += 61
                waves.add(1)
            waves.finish(4, 1)
            waves.expect([(4, 1)])
    line = capsys.readouterr().err.splitlines()[-2]
    assert line == "sweep: 7/8 requests, 0.0164/s, 427 s elapsed, about 61 s left"


def test_progress_that_counts_from_the_start_again(clock, capsys):
    with progress("bench", "requests") as report:
        report(9, 9)
        report(1, 41)
        clock.now += SECONDS_BETWEEN_LINES
        report(21, 41)
    assert capsys.readouterr().err == "bench: 21/41 requests, 0.333/s, 60 s elapsed, about 60 s left\n"


def test_no_remaining_time_before_the_first_item(clock, capsys):
    with progress("work", "steps", 3) as report:
        clock.now += SECONDS_BETWEEN_LINES
        report(3, 9)
    assert capsys.readouterr().err == "work: 3/9 steps, 60 s elapsed\n"


def terminal(monkeypatch, columns):
    """Standard error as a terminal."""
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    return lambda: re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).strip())[-1].strip()


def shown_on(monkeypatch, clock, columns, label, *reports):
    """The last line on a terminal of so many columns, 100 s after the beginning. Reports come every 2 s."""
    last_line = terminal(monkeypatch, columns)
    with progress(label, "prompts", 1) as report:
        clock.now += 100 - 2 * len(reports)
        for item in reports:
            clock.now += 2
            report(*item)
        time.sleep(0.25)  # it is drawn ten times a second
    return last_line()


@pytest.mark.parametrize(
    ("columns", "label", "done", "note", "line"),
    [
        (
            *(140, "generate", 81, "6 failed, 160 tok/s, 32 running"),
            "━╺━━━━━━━━ generate 81/600 prompts, 0.5/s, 0:01:40 elapsed, about 17 min left, 6 failed, 160 tok/s, "
            "32 running",
        ),
        (
            *(100, "generate", 81, "6 failed, 160 tok/s, 32 running"),
            "generate 81/600 prompts, 0.5/s, 0:01:40 elapsed, about 17 min left, 6 failed, 160 tok/s, 32 running",
        ),
        (
            *(80, "generate", 81, "6 failed, 160 tok/s, 32 running"),
            "generate 81/600 prompts, 0:01:40 elapsed, about 17 min left, 6 failed, 160 tok/s",
        ),
        (
            *(80, "eval one_digit_sums", 598, ""),
            "eval one_digit_sums 598/600 prompts, 0.5/s, 0:01:40 elapsed, about 4 s left",
        ),
        (60, "a" * 30, 598, "6 failed", "598/600 prompts, 0:01:40 elapsed, about 4 s left, 6 failed"),
        (30, "generate", 598, "6 failed", "generate 598/600 prompts"),
        (80, "[red]", 598, "", "━━━━━━━━━╸ [red] 598/600 prompts, 0.5/s, 0:01:40 elapsed, about 4 s left"),
    ],
)
def test_parts_that_do_not_fit_on_a_terminal_are_left_out_whole(monkeypatch, clock, columns, label, done, note, line):
    assert shown_on(monkeypatch, clock, columns, label, (done - 1, 600), (done, 600, note)) == line


def test_prefill_shows_prompt_tokens_while_nothing_else_is_reported(clock, monkeypatch):
    last_line = terminal(monkeypatch, 80)
    with progress("generate", "prompts") as report:
        clock.now += 4
        report.prefilled(2048)
        clock.now += 1
        time.sleep(0.25)
        assert last_line() == "generate 0:00:05 elapsed, 410 prompt tok/s"
        report(1, 4, "7 tok/s")
        time.sleep(0.25)
        assert last_line().endswith("1/4 prompts, 0:00:05 elapsed, 7 tok/s")
        clock.now += 1
        time.sleep(0.25)
        assert last_line().endswith("1/4 prompts, 0:00:06 elapsed, 341 prompt tok/s")


def test_prefill_is_printed_every_minute_without_a_terminal(clock, capsys):
    with progress("generate", "prompts") as report:
        for _ in range(6):
            clock.now += SECONDS_BETWEEN_LINES / 6
            report.prefilled(2000)
    assert capsys.readouterr().err == "generate: 60 s elapsed, 400 prompt tok/s\n"


def test_a_phase_is_named_and_has_a_rate_of_its_own(clock, capsys):
    with progress("starting", "steps") as report:
        stages = Stages(Instead(report, report))
        for name, done, total in (("loading", 3, 4), ("recording graphs", 5, 10)):
            stages.begin(name)
            stages(0, total)
            clock.now += SECONDS_BETWEEN_LINES
            stages(done, total)
    assert capsys.readouterr().err.splitlines() == [
        "loading: 3/4 steps, 0.05/s, 60 s elapsed, about 20 s left",
        "recording graphs: 9/14 steps, 0.0833/s, 120 s elapsed, about 60 s left",
    ]


def test_after_a_phase_the_name_before_is_shown_again(clock, capsys):
    with progress("sweep", "requests") as report:
        with phase(report, "tokenizing prompts") as tokenizing:
            clock.now += SECONDS_BETWEEN_LINES
            tokenizing(3, 4)
        clock.now += SECONDS_BETWEEN_LINES
        report(1, 9)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "tokenizing prompts: 3/4 requests",
        "sweep: 1/9 requests",
    ]
    with phase(None, "tokenizing prompts") as none:
        assert none is None


def test_stages_of_a_report_without_phases():
    seen = []
    stages = Stages(lambda *progress: seen.append(progress))
    stages.begin("loading")
    stages(1, 2)
    assert seen == [(1, 2)]
