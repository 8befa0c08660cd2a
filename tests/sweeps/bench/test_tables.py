"""The table of a bench from records: numbers, notes, and consistent rows."""

from __future__ import annotations

import csv
from dataclasses import asdict
from typing import Any

import pytest

from specbatch.config import EngineConfig, Graphs, Speculation
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import device_metrics
from specbatch.sweeps.bench.tables import losses_of, markdown, table, write_table

COUNTERS: dict[str, Any] = {
    "iterations": 10, "iteration_s": 0.02, "host_waits": 1, "overlapped": 8, "launch_lead_s": 0.016, "late_launches": 3,
    "device_s": 0.040, "device_steps": 10, "device_idle_s": 0.008, "device_gaps": 8,
    "graphs": {
        "decode": {"replays": 7, "fallbacks": {"logprobs": 2}, "padded": 4},
        "target_prefill": {"replays": 6, "fallbacks": {"too long": 1}, "padded": 30},
    },
}  # fmt: skip


def step(ms: float, repeat: int = 1, *, graphs: Graphs | None = None, **more: Any) -> RunRecord:
    """A decode step at batch 2."""
    work = {
        "section": "decode", "configuration": "v2", "size": 2, "repeat": repeat, "place": 1, "concurrency": 2,
        "input_len": 8, "output_len": 4, "new_tokens": [2, 4], "steps": 2, "iterations": 2, "step_bytes": 1e9,
        "mean_context": 11,
    }  # fmt: skip
    return RunRecord(
        config=asdict(EngineConfig(model="toy", graphs=graphs or Graphs())),
        caps={"device": "cpu", "dtype": "float32"},
        metrics={"step_s": ms / 1e3},
        counters=COUNTERS,
        requests=[],
        workload=work | more,
    )


def test_the_numbers_of_a_row_are_of_one_median():
    records = [step(ms, repeat) for repeat, ms in enumerate((1.0, 3.0), 1)]
    for record in records:
        record.metrics["products_s"] = 0.001
    (row,) = table(records)
    assert row["step_ms"] == 2.0
    assert row["decode_tok_s"] == 2 / 0.002  # the median of the speeds is 1333
    assert row["step_gb_s"] == 500
    assert row["over_products"] == 2.0


@pytest.mark.parametrize(
    ("ms", "work", "note"),
    [
        (-60.9, {}, "NOT MEASURED: decode v2 2, repeat 2: 4 new tokens took no longer than 2"),
        (0.0, {}, "NOT MEASURED: decode v2 2, repeat 2"),
        (9.0, {"iterations": 3}, "NOT IN STEP: decode v2 2, repeat 2: 3 iterations for 2 tokens."),
    ],
)
def test_an_invalid_step_time_is_a_note(ms, work, note):
    records = [step(4.0, 1), step(ms, 2, **work)]
    (row,) = rows = table(records)
    assert (row["step_ms"], row["step_ms_min"], row["repeats"], row["decode_tok_s"]) == (4.0, 4.0, 1, 500)
    assert note in markdown(records, rows, {})
    (row,) = rows = table(records[1:])
    gone = ("step_ms", "decode_tok_s", "step_gb_s", "read_percent", "over_products", "ratio")
    assert all(row[column] is None for column in gone)
    assert note.startswith(row["not_measured"].partition(":")[0])
    assert not row["failed"]
    assert "| - " in markdown(records[1:], rows, {})


def test_counters_become_columns():
    record = step(4.0, graphs=Graphs("whole", "piecewise"))
    record.metrics |= device_metrics(record.counters)
    (row,) = rows = table([record])
    assert (row["decode_replays"], row["prefill_replays"], row["fallbacks"], row["padded"]) == (7, 6, 3, 34)
    assert row["host_waits_per_step"] == pytest.approx(0.1)
    assert row["launch_lead_ms"] == pytest.approx(2.0)
    assert row["late_launch_percent"] == pytest.approx(37.5)
    assert row["device_idle_percent"] == pytest.approx(100 * 1 / (1 + 4))
    assert row["graph_coverage_percent"] == pytest.approx(100 * 13 / 16)
    assert "NO REPLAYS" not in markdown([record], rows, {})


def test_missing_metrics_are_not_computed_from_counters():
    record = step(4.0)
    record.metrics |= dict.fromkeys(device_metrics(record.counters))
    asked = ("launch_lead_ms", "late_launch_percent", "host_waits_per_step", "device_idle_percent", "decode_replays")
    record.metrics["graph_coverage"] = 0.0  # which graphs do not have that nobody asked for
    (row,) = table([record])
    assert all(
        row[column] is None for column in (*asked, "prefill_replays", "fallbacks", "padded", "graph_coverage_percent")
    )
    assert row["host_ms_per_step"] == 2.0


def test_requested_graphs_without_replays_are_a_note():
    record = step(4.0, graphs=Graphs("whole", "piecewise"))
    still = record.counters["graphs"]["target_prefill"] | {"replays": 0}
    record.counters = record.counters | {"graphs": record.counters["graphs"] | {"target_prefill": still}}
    text = markdown([record], table([record]), {})
    assert "NO REPLAYS: decode v2 2: target prefill graphs were requested" in text
    assert "decode graphs were requested" not in text
    record.config["graphs"]["prefill"] = "off"
    assert "NO REPLAYS" not in markdown([record], table([record]), {})


def test_a_note_on_the_floor_needs_a_bandwidth(tmp_path):
    machine = step(1.0, section="machine", size=0)
    machine.metrics = {"read_bytes_s": 1e12, "gemm_flop_s": 1e12}
    del machine.workload["configuration"]
    for record, folder in ((machine, "machine/0/r1"), (step(4.0), "decode/v2/2/r1")):
        (tmp_path / folder).mkdir(parents=True)
        record.save(tmp_path / folder)
    assert "read bandwidth measured here" in write_table(tmp_path)
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert float(rows[1]["floor_ms"]) == 1.0
    assert "read bandwidth measured here" not in markdown([step(4.0)], table([step(4.0)]), {})


def closed(name: str, step_ms: float, repeat: int = 1, simulated: float | None = None, **more: Any) -> RunRecord:
    """A closed loop; "spec" drafts and accepts 2 tokens a verify."""
    record = step(1.0, repeat, **{"section": "closed", "configuration": name} | more)
    if name == "spec":
        speculation = Speculation("ngram", simulate_accept_length=simulated)
        record.config = asdict(EngineConfig(model="toy", speculation=speculation))
    accept = 1.0 if name != "spec" or simulated == 1 else 2.0
    record.metrics = {"accept_length": accept, "output_throughput": 1.0}
    record.counters = {**record.counters, "steps_by_rows": {"4": [10, step_ms / 100]}}
    return record


def test_break_even_is_over_the_fastest_baseline_step_of_the_repeat():
    records = [
        *(
            closed(name, ms, repeat)
            for repeat, times in ((1, (10, 8)), (2, (20, 30)))
            for name, ms in zip("ab", times, strict=True)
        ),
        closed("spec", 20, 1, simulated=2.0),
        closed("spec", 50, 2, simulated=2.0),
        closed("a", 1, size=9),
        closed("spec", 3, size=9, simulated=2.0),
        step(0.1),  # another section
    ]
    rows = {(row["section"], row["size"], row["configuration"]): row for row in table(records)}
    assert rows["closed", 2, "spec"]["break_even"] == pytest.approx(2.5)  # 20 / 8 and 50 / 20
    assert rows["closed", 2, "spec"]["speculation"] == "loses by 20.0%"
    assert rows["closed", 9, "spec"]["break_even"] == pytest.approx(3.0)
    assert rows["closed", 2, "a"]["break_even"] is None
    assert rows["closed", 2, "a"]["accept_length"] is None
    text = markdown(records, table(records), {})
    decode, loop = (part for part in text.split("## ")[1:])
    assert "break-even accept length | speculation" in loop.replace("  ", "")
    assert "break-even accept length" not in decode
    assert text.count("Break-even: the accept length at which") == 1
    said = losses_of(records)
    assert said is not None
    said = said.log_text
    assert "closed spec 2 (accept length 2.00, 2.50 needed); closed spec 9 (" in said
    assert "causes" not in said  # the acceptance was simulated


def full_batch(name: str, ms: float | None, steps: int = 50, repeat: int = 1, **more: Any) -> RunRecord:
    """Iterations at full batch; "spec" drafts and accepts 2 tokens a verify."""
    record = closed(name, 1.0, repeat, simulated=2.0, **{"section": "decode", "full_batch_steps": steps} | more)
    record.workload |= {"steps": None, "iterations": None}
    record.metrics |= {"step_s": None if ms is None else ms / 1e3}
    return record


def test_drafting_is_compared_by_tokens_at_full_batch():
    records = [
        *(full_batch("baseline", ms, 50, repeat) for repeat, ms in ((1, 4.0), (2, 5.0))),
        *(full_batch("spec", ms, 20, repeat) for repeat, ms in ((1, 6.0), (2, 20.0))),
        full_batch("spec", None, 19, size=9),
        full_batch("baseline", 4.0, size=9),
    ]
    rows = {(row["size"], row["configuration"]): row for row in table(records)}
    spec = rows[2, "spec"]
    assert (spec["ratio_min"], spec["ratio_max"]) == pytest.approx((2 * 5 / 20, 2 * 4 / 6))
    assert spec["break_even"] == pytest.approx((6 / 4 + 20 / 5) / 2)  # not by the time of all steps
    assert spec["decode_tok_s"] == pytest.approx(2 * 2 / 0.013)
    assert rows[2, "baseline"]["decode_tok_s"] == pytest.approx(2 / 0.0045)
    few = rows[9, "spec"]
    assert all(few[column] is None for column in ("step_ms", "decode_tok_s", "ratio", "break_even", "speculation"))
    assert few["not_measured"].startswith("NOT MEASURED: 19 steps ran all 2 requests and 20 are needed")
    text = markdown(records, [*rows.values()], {})
    assert (
        "NOT MEASURED: decode spec 9, repeat 1: 19 steps ran all 2 requests and 20 are needed; use more --new-" in text
    )
    assert "## Iteration at full batch" in text
    assert "ms per step" in text.split("##")[1]
    assert "GB per step" not in text


def test_replays_of_drafts_are_counted_by_kind():
    record = full_batch("spec", 6.0)
    record.config["graphs"] = asdict(Graphs("whole", "piecewise"))
    graphs = record.counters["graphs"] | {"draft_prefill": {"replays": 0, "fallbacks": {}, "padded": 0}}
    record.counters = record.counters | {"graphs": graphs}
    (row,) = rows = table([record])
    kinds = ("decode", "target_prefill", "draft_prefill")
    assert [row[f"{kind}_replays"] for kind in kinds] == [7, 6, 0]
    text = markdown([record], rows, {})
    assert "decode replays" in text
    assert "target prefill replays" in text
    assert "draft prefill replays" in text
    assert " | prefill replays" not in text
    assert "NO REPLAYS: decode spec 2: draft prefill graphs were requested and none was replayed." in text
    assert text.count("NO REPLAYS") == 1


def test_first_tokens_have_no_break_even():
    records = [closed(name, 5.0, simulated=2.0, section="ttft") for name in ("baseline", "spec")]
    assert not any(row["break_even"] or row["speculation"] for row in table(records))


def test_a_verify_that_accepts_nothing_shows_its_break_even():
    records = [closed("a", 8), closed("spec", 12, simulated=1.0)]
    (row,) = (row for row in table(records) if row["break_even"])
    assert row["speculation"] == "pays above 1.50"
    assert losses_of(records) is None
    assert "Break-even" not in markdown(records[:1], table(records[:1]), {})
