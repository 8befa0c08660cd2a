"""Times of kernels: differences of two runs, the rows that are shown, and the passes of a prefill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import typer

from specbatch import Graphs
from specbatch.sweeps.microbench import prefill_kernels
from specbatch.sweeps.microbench.kernel_times import Interval, Kernel, by_time, per_step, totals
from specbatch.sweeps.microbench.step_kernels import tables

LONG = {
    "gemm": Kernel(74, 740.0, 640.0),
    "prefill": Kernel(4, 900.0, 900.0),
    "norm": Kernel(20, 40.0, 20.0),
    "draft": Kernel(10, 5.0, 5.0),
}
SHORT = {"gemm": Kernel(10, 100.0, 80.0), "prefill": Kernel(4, 870.0, 870.0), "norm": Kernel(10, 20.0, 10.0)}


def test_a_kernel_adds_what_ends_after_all_earlier_ones() -> None:
    intervals = [
        Interval("gemm", 10, 20),
        Interval("norm", 15, 23),  # waits for the GEMM
        Interval("copy", 16, 18),  # ends before the GEMM, on another stream
        Interval("gemm", 25, 30),
    ]
    found = totals(intervals)
    assert found == {"copy": (1, 2, 2), "gemm": (2, 15, 9), "norm": (1, 8, 3)}
    assert sum(kernel.added for kernel in found.values()) == 30 - 16, "from the first kernel to the end"


def test_what_both_runs_launched_does_not_count() -> None:
    assert per_step(LONG, SHORT, 10) == {"gemm": (6.4, 64.0, 56.0), "norm": (1.0, 2.0, 1.0), "draft": (1.0, 0.5, 0.5)}


def test_longest_kernels_come_first_and_others_are_added() -> None:
    rows = list(by_time(per_step(LONG, SHORT, 10), most=1))
    assert [(row["kernel"], row["launches"], row["us"], row["us each"], row["added us"]) for row in rows] == [
        ("gemm", "6.4", "64.0", "10.00", "56.0"),
        ("2 others", "2.0", "2.5", "1.25", "1.5"),
        ("all", "8.4", "66.5", "7.92", "57.5"),
    ]
    assert [row["share (%)"] for row in rows] == ["97.4", "2.6", "100.0"]
    assert next(by_time({}, most=1))["us each"] == "-"


def test_settings_of_drafts_need_an_algorithm() -> None:
    with pytest.raises(typer.BadParameter, match="need --algorithm"):
        next(tables(accept_length=2.4))


def test_passes_of_a_prefill_have_the_tokens_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[float] = []

    def profiled(run: Callable[[], float]) -> tuple[float, dict[str, Kernel]]:
        passes.append(run())
        return passes[-1], {"gemm": Kernel(3 * passes[-1], 90.0 * passes[-1], 60.0 * passes[-1])}

    monkeypatch.setattr(prefill_kernels, "profiled", profiled)
    monkeypatch.setattr(prefill_kernels, "Graphs", lambda **_: Graphs())
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    [rows] = [table.measured() for table in prefill_kernels.tables("toy", tokens=12, batch=3, most=5)]
    gemm, total, whole = rows
    assert passes == [prefill_kernels.SHORT, prefill_kernels.LONG]
    assert (gemm["launches"], gemm["us"], gemm["added us"]) == ("3.0", "90.0", "60.0")
    assert (total["kernel"], whole["kernel"], float(whole["us"]) > 0) == ("all", "pass", True)
