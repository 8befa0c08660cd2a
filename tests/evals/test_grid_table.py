"""The table of an evaluation in several configurations, from reports as if an engine had run."""

from __future__ import annotations

import pytest
from made_runs import make_report

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.evals.grid_table import Grid, grid_of
from specbatch.evals.report import EvalReport

CONFIGS = {"baseline": EngineConfig(), "v1": EngineConfig(speculation=Speculation("ngram", "v1"))}


def made(right: str, config: EngineConfig | None = None) -> EvalReport:
    report = make_report(right, config=config)
    for row in report.questions:
        row["token_ids"] = [1]
    report.record.config |= {"model": "toy", "graphs": {}}
    return report


def grid(*reports: EvalReport) -> Grid:
    """One repeat of each configuration."""
    for name, report in zip(CONFIGS, reports, strict=True):
        report.record.workload |= {"configuration": name, "concurrency": 4, "repeat": 1}
    return grid_of({(4, name): [one] for name, one in zip(CONFIGS, reports, strict=True)}, CONFIGS, {}, 1)


def test_repeats_that_failed_are_left_out_by_name() -> None:
    """They are no speed of 0."""
    reports: dict[tuple[int, str], list[EvalReport]] = {}
    for name, speeds in (("baseline", [100.0, 100.0]), ("v1", [150.0, 0.0])):
        for speed in speeds:
            report = made("1101")
            report.record.metrics["output_throughput"] = speed
            report.record.workload |= {"configuration": name, "concurrency": 4, "repeat": 1}
            if not speed:
                report.record.metrics["requests"] = 0
                report.record.counters["errors"] = {"down": 4}
            reports.setdefault((4, name), []).append(report)
    found = grid_of(reports, CONFIGS, {}, 2)
    assert {place: len(known) for place, known in found.reports.items()} == {(4, "baseline"): 2, (4, "v1"): 1}
    assert found.left_out == {"v1 at concurrency 4, repeat 2 of 2": "every request failed: down (4)"}
    assert [row.get("speedup") for row in found.rows()] == [None, 1.5]
    assert "1 of 2" in found.table()


def test_a_round_of_two_machines_is_named() -> None:
    one, other = made("11"), made("11")
    assert "OTHER MACHINE" not in grid(one, other).table()
    other.record.hardware["cpu"] = "slide rule"
    text = "compare machines, too: baseline with cpu abacus; v1 with cpu slide rule"
    assert f" Note: OTHER MACHINE: ratios at concurrency 4, repeat 1, {text}" in grid(one, other).table()


def test_settings_that_differ_are_named() -> None:
    table = grid(made("11", EngineConfig(prefill_chunk=8)), made("11", EngineConfig(prefill_chunk=16))).table()
    lines = [line for line in table.splitlines() if line.startswith("* ")]
    assert [line.rpartition(";")[2] for line in lines] == [" prefill_chunk=8", " prefill_chunk=16"]
    alike = grid(made("11"), made("11")).table()
    assert [line for line in alike.splitlines() if line.startswith("* ") and "; prefill_chunk" in line] == []


def test_a_difference_of_graded_scores_has_a_standard_error_unless_all_are_equal() -> None:
    old, new = made("1100"), made("1100")
    for report in (old, new):
        for row in report.questions:
            row["scores"] = {"loose": {"match": 0.4}}
    assert "difference_stderr" not in grid(old, new).rows()[1]
    new.questions[0]["scores"]["loose"]["match"] = 0.8
    assert grid(old, new).rows()[1]["difference_stderr"] == pytest.approx(0.1)
