"""Gains: deltas in the units of their titles, regressions named with what is known of them, few samples noted."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_record, metrics_of
from swept import saved

from specbatch.sweeps.report.gains import AllGains, gains_of

SLOWER = (0.2, 0.02)


def run(folder: Path, tpot: float, count: int = 12, durations: tuple[float, ...] = (2.0,)) -> Path:
    rows = [metrics_of(ttft=0.1 + place / 1000, tpot_s=tpot) for place in range(count)]
    records = [
        make_record(rows, repeat=repeat, duration=duration) for repeat, duration in enumerate(durations, start=1)
    ]
    return saved(folder, *records)


def gains(before: Path, after: Path) -> AllGains:
    return gains_of({"before": before, "after": after})


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_table(tmp_path: Path) -> None:
    found = gains(run(tmp_path / "a", 0.010), run(tmp_path / "b", 0.013, durations=(1.6,)))
    text = found.markdown()
    p99 = 1000 * np.percentile([0.1 + place / 1000 for place in range(12)], 99)
    assert cells(text) == [
        ["4", "output tok/s", "126.0", "157.5", "+31.5", "+25.0% (one repeat)"],
        ["", "p99 TTFT (ms)", f"{p99:.1f}", f"{p99:.1f}", "+0.0", "+0.0%"],
        ["", "mean TPOT (ms)", "10.00", "13.00", "+3.00", "+30.0% (regression, one repeat)"],
    ]
    assert "* regressions: mean TPOT at concurrency 4 (+30.0%)\n" in text
    assert "* FEW SAMPLES: p99 TTFT at concurrency 4 is of 12; it needs 100\n" in text
    rows = list(csv.DictReader(found.csv().splitlines()))
    assert [float(row["gain"]) for row in rows] == pytest.approx([0.25, 0, 0.3])


def test_enough_samples_have_no_note(tmp_path: Path) -> None:
    text = gains(run(tmp_path / "a", 0.01, 100), run(tmp_path / "b", 0.01, 100)).markdown()
    assert "FEW SAMPLES" not in text
    assert "* regressions: none" in text


def test_a_shown_loss_is_a_regression_without_a_remark(tmp_path: Path) -> None:
    both = tmp_path / "sweep"
    for name, factor in (("v1", 1.0), ("v2", 1.5)):
        rows = [metrics_of() for _ in range(12)]
        saved(
            both,
            *(
                make_record(rows, configuration=name, repeat=repeat, duration=factor * (2 + repeat / 100))
                for repeat in (1, 2, 3)
            ),
        )
    text = gains(both / "v1", both / "v2").markdown()
    assert cells(text)[0][-1] == "-33.3% (regression)"


def test_numbers_that_are_zero_or_missing(tmp_path: Path) -> None:
    before, after = run(tmp_path / "a", 0.0), run(tmp_path / "b", 0.01)
    assert cells(gains(before, after).markdown())[2][2:] == ["0.00", "10.00", "+10.00", "- (regression, not judged)"]
    assert cells(gains(after, before).markdown())[2][2:] == ["10.00", "0.00", "-10.00", "-100.0% (one repeat)"]
    assert cells(gains(before, before).markdown())[2][2:] == ["0.00", "0.00", "+0.00", "-"]
    rows = [metrics_of(tpot_s=None) for _ in range(12)]
    found = gains(after, saved(tmp_path / "c", make_record(rows)))
    assert cells(found.markdown())[2][2:] == ["10.00", "-", "-", "-"]
    assert list(csv.DictReader(found.csv().splitlines()))[2]["gain"] == ""


def test_points_that_are_not_in_the_table_are_named(tmp_path: Path) -> None:
    rows = [metrics_of() for _ in range(12)]
    before = saved(tmp_path / "a", *(make_record(rows, concurrency=size) for size in (1, 4, 8)))
    after = saved(
        tmp_path / "b", make_record(rows), make_record(rows, concurrency=8, error="no memory"),
        make_record(rows, concurrency=16),
    )  # fmt: skip
    text = gains(before, after).markdown()
    assert {row[0] for row in cells(text)} == {"4", ""}
    assert f"* ONLY IN {before}: concurrency 1\n* ONLY IN {after}: concurrency 16\n" in text
    assert f"* FAILED: {after} concurrency 8: no memory\n" in text
