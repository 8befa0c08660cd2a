"""Kernels of a decode step: differences of two runs, and the rows that are shown."""

from __future__ import annotations

import pytest
import typer

from specbatch.sweeps.microbench.step_kernels import Kernel, by_time, per_step, tables

LONG = {
    "gemm": Kernel(74, 740.0),
    "prefill": Kernel(4, 900.0),
    "norm": Kernel(20, 40.0),
    "draft": Kernel(10, 5.0),
}
SHORT = {"gemm": Kernel(10, 100.0), "prefill": Kernel(4, 870.0), "norm": Kernel(10, 20.0)}


def test_what_both_runs_launched_does_not_count() -> None:
    assert per_step(LONG, SHORT, 10) == {"gemm": (6.4, 64.0), "norm": (1.0, 2.0), "draft": (1.0, 0.5)}


def test_longest_kernels_come_first_and_others_are_added() -> None:
    rows = list(by_time(per_step(LONG, SHORT, 10), most=1))
    assert [(row["kernel"], row["launches"], row["us"], row["us each"]) for row in rows] == [
        ("gemm", "6.4", "64.0", "10.00"),
        ("2 others", "2.0", "2.5", "1.25"),
        ("all", "8.4", "66.5", "7.92"),
    ]
    assert [row["share (%)"] for row in rows] == ["96.2", "3.8", "100.0"]
    assert next(by_time({}, most=1))["us each"] == "-"


def test_settings_of_drafts_need_an_algorithm() -> None:
    with pytest.raises(typer.BadParameter, match="need --algorithm"):
        next(tables(accept_length=2.4))
