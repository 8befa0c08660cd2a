"""Notes about single points."""

from __future__ import annotations

import itertools
import math

import pytest
from sweep_tables import full_batch, pair, record, text_of

from specbatch.sweeps.report.notes import notes
from specbatch.sweeps.report.points import View
from specbatch.sweeps.report.tables import markdown, table


def test_a_step_without_enough_iterations_is_a_note_where_it_is_shown():
    records = [full_batch("v1", None, steps=19)]
    view = View(("step_s",), "step_s", None)
    note = "NOT MEASURED: v1 at concurrency 4, repeat 1: only 19 full-batch steps; 20 are needed"
    assert any(str(item).startswith(note) for item in notes(records, table(records, view), view=view))
    assert note not in markdown(records, table(records))


def test_a_failed_point_is_a_note_and_leaves_the_others_alone():
    records = [record("baseline", 1, 10.0), record("v1", 1, 15.0, error="no memory"), record("v2", 1, 15.0)]
    records[1].metrics, records[1].caps = {}, {}
    rows = table(records)
    assert rows.repeats.to_list() == [1, 0, 1]
    assert rows.failed.isna().to_list() == [True, False, True]
    assert rows.ratio.to_list() == pytest.approx([1.0, math.nan, 1.5], nan_ok=True)
    assert "FAILED: v1 at concurrency 4, repeat 1: no memory" in markdown(records, rows)


def test_run_without_drafts_has_a_note():
    records = [record("v1", 1, 10.0)]
    records[0].metrics["drafted_tokens"] = 0
    assert "NO DRAFTS: v1" in text_of(records)


def test_graphs_that_were_never_replayed_are_named():
    records = [record("baseline", 1, 10.0)]
    records[0].config["graphs"] = {"decode": "whole", "prefill": "piecewise"}
    graphs = {"decode": {"replays": 5}, "target_prefill": {"replays": 0}, "draft_prefill": {"replays": 0}}
    records[0].counters["graphs"] = graphs
    records[0].metrics["graph_coverage"] = 0.9
    text = text_of(records)
    assert "NO REPLAYS: baseline at concurrency 4, repeat 1: target prefill graphs were requested and none" in text
    assert "repeat 1: draft prefill graphs were requested and none" in text
    assert "decode graphs" not in text


def test_graphs_that_no_point_of_a_configuration_replayed_are_one_note():
    records = [record(name, repeat, 10.0) for repeat in (1, 2, 3) for name in ("baseline", "v1")]
    for one in records:
        one.config["graphs"] = {"decode": "off", "prefill": "piecewise"}
        one.counters["graphs"] = {"target_prefill": {"replays": one.workload["configuration"] == "v1"}}
    text = text_of(records)
    assert text.count("NO REPLAYS") == 1
    assert "NO REPLAYS: baseline at concurrency 4, repeat 1, and 2 other points: target prefill graphs were" in text


def test_rounds_of_two_machines_are_named():
    """A sweep that was continued on another machine; a round that was measured there as a whole needs no note."""
    records = [record(name, repeat, 10.0) for repeat in (1, 2, 3) for name in ("baseline", "v1", "v2")]
    for one in records:
        other = one.workload["repeat"] == 3 or (one.workload["repeat"] == 2 and one.workload["configuration"] != "v1")
        one.hardware = {"gpu": "NVIDIA H200", "gpu_id": "22" if other else "11", "cpu": "abacus", "cores": 2}
        one.caps["device"] = "cuda:0"
    text = text_of(records)
    assert text.count("OTHER MACHINE") == 1
    assert (
        "* OTHER MACHINE: ratios at concurrency 4, repeat 2, compare machines, too: baseline and v2 with gpu_id 22; "
        "v1 with gpu_id 11; delete the points of this round and repeat the command\n" in text
    )
    others = [{"gpu": "NVIDIA H200"}, {"gpu": "NVIDIA H200", "gpu_id": "11"}, {"cpu": "abacus"}]
    for hardware, one in zip(itertools.cycle(others), records, strict=False):
        one.hardware = hardware  # an earlier version does not say which GPU, a client not even whether there is one
    assert "OTHER MACHINE" not in text_of(records)


def test_the_gpu_of_a_machine_does_not_tell_runs_on_its_cpu_apart():
    records = [record(name, 1, 10.0) for name in ("baseline", "v1", "v2")]
    for number, one in enumerate(records):
        one.hardware = {"gpu": "NVIDIA H200", "gpu_id": str(number), "cpu": "abacus", "cores": 2}
        one.caps["device"] = "cpu"
    assert "OTHER MACHINE" not in text_of(records)
    records[1].workload["error"], records[1].hardware = "no memory", {"cpu": "slide rule"}
    assert "OTHER MACHINE" not in text_of(records)
    records[2].hardware = {"cpu": "slide rule", "cores": 2}
    assert "baseline with cpu abacus; v2 with cpu slide rule" in text_of(records)


def test_repeated_prompts_are_noted():
    records = [record(name, 1, 10.0, distinct_prompts=1) for name in ("baseline", "v1")]
    text = text_of(records)
    assert "* REPEATED: only 1 different prompt; " in text
    assert "(baseline at concurrency 4, repeat 1, and 1 other point).\n" in text
    records = [record("baseline", 1, 10.0, distinct_prompts=2)]
    assert "REPEATED" not in text_of(records)


@pytest.mark.parametrize(
    ("last", "note"),
    [
        (4.40e12, None),  # within 3%
        (3.90e12, "LIMITS CHANGED: read bandwidth of the GPU: 4.49 TB/s before baseline at concurrency 4, repeat 1 and "
         "3.90 TB/s after v1 at concurrency 4, repeat 1, 15.1% apart; clock 1400 to 1980 MHz, memory 70 to 95 C, "
         "power cap in up to 50% of the samples of a point"),
    ],
)  # fmt: skip
def test_limits_that_changed_are_a_note(last: float, note: str | None):
    records = pair()
    for one, (before, after) in zip(records, ((4.49e12, 4.45e12), (4.45e12, last)), strict=True):
        gpu = {"samples": 4, "sm_clock_mhz": [1400, 1700, 1980], "memory_temperature_c": [70, 80, 95]}
        one.conditions = {
            "limits": {"before": {"read_bytes_s": before}, "after": {"read_bytes_s": after}},
            "gpus": {"0": gpu | {"throttle": {"power cap": 0.5}}},
        }
    found = [str(item) for item in notes(records, table(records)) if item.warning == "LIMITS CHANGED"]
    assert found == ([] if note is None else [f"{note}; compare points of the same round only"])


def test_limits_that_failed_are_no_change():
    records = pair()
    for one in records:
        one.conditions = {"limits": {"before": {"error": "CUDA out of memory"}, "after": {}}, "gpus": {}}
    assert not [item for item in notes(records, table(records)) if item.warning == "LIMITS CHANGED"]
