"""The metric registry: it covers every number of a record, and the documentation has its definitions."""

from __future__ import annotations

from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.records.bench_metrics import OF_BENCH
from specbatch.records.metrics import METRICS, RELATIVE, glossary
from specbatch.records.request_metrics import OF_REQUESTS
from specbatch.records.run_totals import percentile_name
from specbatch.records.step_metrics import OF_STEPS
from specbatch.records.steps import Counters
from specbatch.records.summarize import step_metrics


def test_an_engine_counts_what_metrics_of_steps_read() -> None:
    assert set(step_metrics(Counters().as_dict() | {"graphs": {}}, 1, None).values()) == {None, 0}


def test_names_are_unique_and_definitions_are_sentences() -> None:
    headings = [metric.heading for metric in METRICS.values()]
    assert not METRICS.keys() & RELATIVE.keys()
    assert len(METRICS) == len((*OF_REQUESTS, *OF_STEPS, *OF_BENCH))
    assert len(set(headings)) == len(headings)
    for name, text in glossary():
        assert text.endswith("."), name
        assert "  " not in text


def test_values_have_units_and_medians_skip_missing_ones() -> None:
    records = [SimpleNamespace(metrics={"mean_ttft_s": value}, requests=[]) for value in (0.5, None, 0.25, 0.75)]
    ttft = METRICS["mean_ttft_s"]
    assert ttft.read(records[0]) == 0.5
    assert ttft.read(records[1]) is None
    assert ttft.over_repeats(records) == 0.5
    assert ttft.over_repeats(records[1:2]) is None
    assert [ttft.text(value) for value in (0.5, None, float("nan"))] == ["500.0", "-", "-"]
    assert (ttft.heading, METRICS["device_idle_share"].heading) == ("mean TTFT (ms)", "device idle (%)")


def measured(*times: float, name: str = "ttft_s", rows: bool = True, reason: str = "length") -> SimpleNamespace:
    """A record of requests, with or without their rows."""
    numbers = {f"{percentile_name(percent)}_{name}": float(np.percentile(times, percent)) for percent in (50, 90, 99)}
    numbers |= {f"mean_{name}": fmean(times), f"max_{name}": max(times)}
    kept = [{"finish_reason": reason, name: time} for time in times] if rows else []
    return SimpleNamespace(metrics=numbers, requests=kept)


TIMES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)


@given(st.lists(TIMES, min_size=1, max_size=6))
def test_times_over_repeats_are_of_one_sample(repeats: list[list[float]]) -> None:
    records, every = [measured(*times) for times in repeats], [time for times in repeats for time in times]
    parts = ("median", "p90", "p95", "p99", "max")
    found = [METRICS[f"{part}_ttft_s"].over_repeats(records) for part in parts]
    known = [value for value in found if value is not None]
    assert sorted(known) == known
    assert min(every) <= known[0]
    assert known[-1] == max(every)
    assert METRICS["mean_ttft_s"].over_repeats(records) == pytest.approx(fmean(every))
    assert [value is not None for value in found[1:4]] == [len(every) >= least for least in (10, 20, 100)]


def test_times_whose_rows_are_lost_have_no_percentiles_over_repeats() -> None:
    lost, kept = measured(1.0, 3.0, rows=False), measured(5.0)
    for records in ([lost, kept], [lost, lost]):
        assert METRICS["median_ttft_s"].over_repeats(records) is METRICS["p99_ttft_s"].over_repeats(records) is None
        means, most = ([record.metrics[f"{part}_ttft_s"] for record in records] for part in ("mean", "max"))
        assert METRICS["mean_ttft_s"].over_repeats(records) == fmean(means)
        assert METRICS["max_ttft_s"].over_repeats(records) == max(most)
    assert METRICS["median_ttft_s"].over_repeats([lost]) == 2.0  # of one repeat the record has all that there is
