"""Metrics by their definitions, and records on disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_record, metrics_of

from specbatch.config.engine_config import EngineConfig
from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.files.atomic_file import write_atomic
from specbatch.records.environment import hardware, versions
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.run_totals import TimeSample
from specbatch.records.store import load_record
from specbatch.records.summarize import (
    emitted_histogram,
    most_at_once,
    peak_throughput,
    summarize,
    total_acceptance,
)


def completion(index: int = 0, reason: str = "length", **numbers: Any) -> Completion:
    return Completion(index, [1], [2], "b", reason, RequestMetrics(**numbers))


TWO = [
    completion(
        prompt_tokens=10, cached_tokens=4, output_tokens=5, queue_s=0.5, ttft_s=1.0, tpot_s=0.25, e2e_s=2.0,
        verify_steps=2, emitted=4, drafted=8, accepted=2, emitted_histogram=[0, 1, 0, 1], retractions=1,
        acceptance=Acceptance(drafted=[1, 0, 3], accepted=[2, 2], exhausted=[1], verifies=[0, 4], emitted=[0, 6]),
        itl_s=[0.1, 0.1, 0.1, 0.7],
    ),
    completion(
        prompt_tokens=20, output_tokens=13, ttft_s=3.0, tpot_s=0.75, e2e_s=12.0, verify_steps=6, emitted=12,
        drafted=24, accepted=6, emitted_histogram=[0, 2, 2, 2], itl_s=[0.5],
        acceptance=Acceptance(drafted=[0, 1], accepted=[0, 1], exhausted=[0, 1], verifies=[1], emitted=[2]),
    ),
]  # fmt: skip


def test_totals_are_sums_over_the_run() -> None:
    found = summarize(TWO, 4.0, concurrency=2)
    expected = {
        "requests": 2, "input_tokens": 30, "output_tokens": 18, "cached_tokens": 4, "accept_length": 16 / 8,
        "accept_rate": 8 / 32, "request_throughput": 0.5, "input_throughput": 7.5, "output_throughput": 4.5,
        "total_throughput": 12.0, "per_user_throughput": 2.25, "verify_steps": 8, "drafted_tokens": 32,
        "accepted_tokens": 8, "retractions": 1, "duration_s": 4.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_spreads() -> None:
    found = summarize(TWO, 4.0)
    assert (found["mean_ttft_s"], found["median_ttft_s"], found["max_ttft_s"]) == (2.0, 2.0, 3.0)
    assert found["mean_itl_s"] == pytest.approx(1.5 / 5)
    assert found["median_itl_s"] == pytest.approx(0.1)
    assert found["per_user_throughput"] is None
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert {f"{kind}_{name}" for kind in ("mean", "median", "p90", "p99", "max")} <= set(found)


@pytest.mark.parametrize(("percent", "least"), [(90, 10), (95, 20), (99, 100)])
def test_percentiles_need_requests_above_them(percent: int, least: int) -> None:
    rows = [completion(output_tokens=2, ttft_s=float(n), tpot_s=1.0, e2e_s=1.0) for n in range(least)]
    assert summarize(rows, 1.0)[f"p{percent}_ttft_s"] == pytest.approx(percent / 100 * (least - 1))
    assert summarize(rows[1:], 1.0)[f"p{percent}_ttft_s"] is None


def test_percentiles_are_of_the_requests_of_all_repeats() -> None:
    metric = METRICS["p99_ttft_s"]
    repeats = [make_record([metrics_of(ttft=one)] * 40) for one in (1.0, 2.0, 3.0)]
    assert metric.over_repeats(repeats[:2]) is None
    assert metric.over_repeats(repeats) == pytest.approx(3)
    assert METRICS["median_ttft_s"].over_repeats(repeats) == pytest.approx(2)
    tokens = [make_record([metrics_of(itl_s=[0.1] * 60)] * 2)]
    assert METRICS["p99_itl_s"].over_repeats(tokens) == pytest.approx(0.1)
    ended = make_record([metrics_of()] * 200, finish="abort")
    assert metric.over_repeats([ended]) is None


def test_missing_measurements_are_none() -> None:
    found = summarize([], 0.0)
    assert (found["requests"], found["output_tokens"]) == (0, 0)
    for name in ("output_throughput", "accept_length", "accept_rate", "mean_ttft_s", "p99_itl_s", "max_e2e_s"):
        assert found[name] is None
    one = summarize([completion(output_tokens=1, ttft_s=1.0, e2e_s=1.0)], 1.0)
    assert (one["mean_tpot_s"], one["accept_length"], one["mean_ttft_s"]) == (None, None, 1.0)


def test_aborted_requests_are_not_counted() -> None:
    counts = Acceptance([0, 9], [9], [], [9], [9])
    aborted = completion(
        reason="abort", output_tokens=99, verify_steps=9, emitted=9, emitted_histogram=[0, 9], acceptance=counts
    )
    assert summarize([*TWO, aborted], 4.0) == summarize(TWO, 4.0)
    assert emitted_histogram([*TWO, aborted]) == emitted_histogram(TWO)
    assert total_acceptance([*TWO, aborted]) == total_acceptance(TWO)


def test_acceptance_by_draft_and_context_is_summed_over_requests() -> None:
    total = total_acceptance(TWO)
    counters = {"drafted": [4, 3], "tried": [4, 2], "accepted": [3, 0], "context": [[1, 1, 2], [2, 4, 6]]}
    assert total.as_counters() == counters
    assert summarize(TWO, 1.0)["first_draft_accept_rate"] == 3 / 4
    assert summarize([], 1.0)["first_draft_accept_rate"] is None
    assert TWO[0].metrics.acceptance.verifies == [0, 4], "summing does not change the counts of requests"


def test_histograms_add_up() -> None:
    assert emitted_histogram(TWO) == [0, 3, 2, 3]
    longer = completion(emitted_histogram=[0, 1, 0, 0, 0, 2])
    assert emitted_histogram([completion(), *TWO, longer]) == [0, 4, 2, 3, 0, 2]
    assert emitted_histogram([]) == []
    counts = emitted_histogram(TWO)
    found = summarize(TWO, 1.0)["accept_length"]
    assert found == sum(place * count for place, count in enumerate(counts)) / sum(counts)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_match_numpy(values: list[float], percent: float) -> None:
    sample = TimeSample()
    sample.extend(values)
    assert sample.percentile(percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_record_survives_a_round_trip(tmp_path: Path) -> None:
    rows, metrics = [item.as_row() for item in TWO], summarize(TWO, 4.0)
    record = RunRecord(EngineConfig(model="modèle").as_dict(), {"kv_pages": 7}, metrics, {}, rows, {"seed": 1})
    record.save(tmp_path)
    loaded = load_record("folder", tmp_path)
    assert loaded == record
    assert loaded.requests[0]["acceptance"]["drafted"] == [1, 0, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "requests.jsonl"]
    body = json.loads((tmp_path / "record.json").read_text())
    assert body["schema"] == 1
    assert "requests" not in body
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 2
    (tmp_path / "requests.jsonl").unlink()
    assert load_record("folder", tmp_path).requests == []


def test_files_are_utf8_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: "latin-1")
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "latin-1")
    write_atomic(tmp_path / "x", "é☃")
    assert (tmp_path / "x").read_bytes() == "é☃".encode()


def test_environment_of_a_record() -> None:
    assert {"python", "torch"} <= set(versions())
    found = hardware()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["cpu"]


def test_the_gpu_of_a_record_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    properties = [SimpleNamespace(name=name, uuid=name, total_memory=2**30) for name in ("first", "second")]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda place: properties[place])
    found = [hardware(device) for device in (None, "cpu", "cuda", "cuda:0", "cuda:1")]
    assert [one["gpu"] for one in found] == ["first"] * 4 + ["second"]
    assert len({one["gpu_id"] for one in found}) == 2


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=200), st.floats(0.0, 5.0))
def test_peak_throughput_is_at_least_the_mean(times: list[float], rest: float) -> None:
    duration = max(times) + rest
    peak = peak_throughput(Counter(int(time) for time in times), duration)
    assert (peak is None) == (duration < 2)
    assert peak is None or peak >= len(times) / duration * (1 - 1e-12)


def test_peak_throughput_is_that_of_the_busiest_second() -> None:
    assert peak_throughput({0: 5, 1: 40, 2: 7}, 3.0) == 40.0
    assert peak_throughput({0: 5, 1: 40, 2: 40}, 2.5) == 80 / 1.5  # what follows the last whole second is part of it
    assert peak_throughput({0: 5}, 1.9) is peak_throughput({0: 0}, 9.0) is None


def test_most_requests_at_once() -> None:
    assert most_at_once([]) is None
    assert most_at_once([(0, 2), (1, 3), (2, 4)]) == 2  # the first ends when the last begins
    assert most_at_once([(0, 9), (1, 2), (1, 3), (4, 5)]) == 3
