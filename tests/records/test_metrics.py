"""The metric registry: it covers every number of a record, and the documentation has its definitions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from specbatch.records.metrics import METRICS, RELATIVE, glossary, glossary_markdown
from specbatch.records.summarize import device_metrics, full_batch_metrics, summarize

DOCS = Path(__file__).parents[2] / "docs/glossary.md"
NO_STEPS = {
    "device_steps": 0, "device_gaps": 0, "device_s": 0.0, "device_idle_s": 0.0, "graphs": {}, "overlapped": 0,
    "launch_lead_s": 0.0, "late_launches": 0, "host_waits": 0, "iterations": 0, "iteration_s": 0.0,
}  # fmt: skip

STEPS = full_batch_metrics({"steps_by_rows": {}}, 1, None)


def test_every_metric_of_a_record_is_registered() -> None:
    assert set(summarize([], 1.0, 1)) | set(device_metrics(NO_STEPS)) | set(STEPS) <= set(METRICS)


def test_names_are_unique_and_definitions_are_sentences() -> None:
    headings = [metric.heading for metric in METRICS.values()]
    assert not METRICS.keys() & RELATIVE.keys()
    assert len(set(headings)) == len(headings)
    for name, text in glossary():
        assert text.endswith("."), name
        assert "  " not in text


def test_values_have_units_and_medians_skip_missing_ones() -> None:
    records = [SimpleNamespace(metrics={"mean_ttft_s": value}) for value in (0.5, None, 0.25, 0.75)]
    ttft = METRICS["mean_ttft_s"]
    assert ttft.read(records[0]) == 0.5
    assert ttft.read(records[1]) is None
    assert ttft.over_repeats(records) == 0.5
    assert ttft.over_repeats(records[1:2]) is None
    assert [ttft.text(value) for value in (0.5, None, float("nan"))] == ["500.0", "-", "-"]
    assert (ttft.heading, METRICS["device_idle_share"].heading) == ("mean TTFT (ms)", "device idle (%)")


def test_documentation_has_the_definitions() -> None:
    assert glossary_markdown() in DOCS.read_text()
