"""Reports of generating tasks: table, CSV, and files that are read again."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbatch.config.speculation import Speculation
from specbatch.evals.report import EvalReport


def test_table(evaluate: Any) -> None:
    report = evaluate(limit=4)
    lines = report.table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["task", "filter", "metric", "score", "stderr", "n", "unparsed"]
    assert cells[2] == ["gsm8k", "strict-match", "exact_match", "0.2500", "0.2500", "4", "75.0%"]
    assert cells[3] == ["gsm8k", "flexible-extract", "exact_match", "0.5000", "0.2887", "4", "25.0%"]
    assert cells[4][:4] == ["answers", "truncated", "accept length", "accept rate"]
    assert cells[4][4:7] == ["mean TTFT (ms)", "mean queue time (ms)", "mean TPOT (ms)"]
    assert cells[6][:5] == ["4", "25.0%", "2.500", "0.375", "2000.0"]
    assert cells[6][6] == "10.00"
    assert lines[lines.index("```") : lines.index("```") + 6] == [
        "```", "Accuracy: 0.500", "Invalid: 0.250", f"Latency: {report.record.metrics['duration_s']:.3f} s",
        f"Output throughput: {report.record.metrics['output_throughput']:.3f} token/s", "```",
    ]  # fmt: skip
    assert "float32 on cpu. Speculation: no speculation, schedule v2." in lines[-3]
    assert "from bundled gsm8k train (7,473 questions" in lines[-2]
    for part in (report.prompts_sha256[:16], "up to 256 tokens", report.lm_eval_version, "seed 1234", "plain text"):
        assert part in lines[-1]


def test_saved_report_is_read_again(report: Any, report_folder: Path) -> None:
    loaded = EvalReport.load(report_folder)
    assert loaded == report
    assert loaded.table() + "\n" == (report_folder / "summary.md").read_text()


def test_rows_survive_odd_line_separators(tmp_path: Path, evaluate: Any) -> None:
    report = evaluate(reply=lambda prompt: " a\u2028b\x85c 5", limit=2, output=tmp_path / "out")
    assert EvalReport.load(tmp_path / "out").questions == report.questions


def test_csv_has_a_row_per_score(report: Any, report_folder: Path) -> None:
    with (report_folder / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    scores = [(row["filter"], float(row["value"]), row["n"]) for row in rows]
    assert scores == [("strict-match", 0.25, "8"), ("flexible-extract", 0.5, "8")]
    assert rows[0]["accept_length"] == "2.5"
    assert rows[0]["task"] == "gsm8k"
    assert float(rows[0]["truncated"]) == 0.25


def test_table_shows_incomplete_answers_simulation_and_acceptance_only_where_present(evaluate: Any) -> None:
    report = evaluate(limit=2)
    for text in ("incomplete", "simulated", "reached draft"):
        assert text not in report.table()
    assert report.flat()[0]["simulated_accept_length"] is None
    report.questions[0]["finish_reason"] = "abort"
    report.record.config["speculation"] = asdict(Speculation("ngram", simulate_accept_length=3.5))
    counts = {"drafted": [10, 10], "tried": [10, 6], "accepted": [6, 3], "context": [[64, 10, 19]]}
    report.record.counters = {"acceptance": counts, "emitted_histogram": [0, 4, 3, 3]}
    for text in ("1 incomplete answer, scored", "simulated acceptance (geometric, mean 3.5)", "| 10         | 60 30 "):
        assert text in report.table()
    assert report.flat()[0]["simulated_accept_length"] == 3.5
