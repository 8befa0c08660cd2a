"""A metric is one entry of the registry: its number, its check, its columns and its documentation follow from it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from crossed import first_quick
from named_in import files_naming

from specbatch.records.request_metrics import OF_REQUESTS
from specbatch.records.step_metrics import OF_STEPS
from specbatch.records.steps import Counters

ROOT = Path(__file__).parents[2]
# Why files name metrics -> these files.
CHOSEN_IN: dict[str, tuple[str, ...]] = {
    "columns of a table of its own": (
        "evals/few_shot.py", "evals/grid_table.py", "evals/lm_eval_files.py", "sweeps/bench/limits.py",
        "sweeps/bench/one_batch.py", "sweeps/bench/sections.py", "sweeps/microbench/acceptance.py",
        "sweeps/report/acceptance.py", "sweeps/report/gains.py", "sweeps/report/groups.py", "sweeps/report/serving.py",
        "sweeps/report/tables.py",
        "specbatch/records/reasoning.py",
    ),
    "lines of a summary": (
        "evals/report.py", "specbatch/cli/generate.py", "specbatch/engine/trace.py", "sweeps/check/server_report.py",
    ),
    "plots, notes and sentences": tuple(
        f"sweeps/report/{name}.py" for name in ("notes", "plots", "point_notes", "points", "sentences")
    ),
    "what is compared first": ("specbatch/records/runs.py", "sweeps/report/advice.py", "sweeps/report/compare.py"),
    "measured there, or read from a server": (
        "specbatch/engine/record_window.py", "specbatch/engine/scoring.py", "specbatch/records/objectives.py",
        "specbatch/servers/engine.py", "specbatch/servers/server_counters.py",
    ),
    "an example in the documentation": ("sweeps/report/records_page.py",),
    "a setting of the same name": ("sweeps/workload/settings.py",),
}  # fmt: skip
# Adds an entry before anything else reads the registry, then asks for the metric wherever it should be.
ADDED = """
import sys
from pathlib import Path

from specbatch.records import {module} as entries
from specbatch.records.metric import Metric

sentence = "It is new."
entries.{registry} += (
    Metric("new", "news", "ms", sentence, "a / b", better="lower", {source}=lambda run: 0.002, sweep=9, compare=9),
)

import pytest
from made_runs import make_record, metrics_of
from swept import saved

import specbatch
from specbatch.evals.gate.policy import load_policy
from specbatch.records.metrics import glossary
from specbatch.records.steps import Counters
from specbatch.records.store import load_record
from specbatch.records.summarize import step_metrics, summarize
from specbatch.sweeps.report.compare import compare
from specbatch.sweeps.report.records_page import pages
from specbatch.sweeps.report.tables import write_summary

folder, docs = map(Path, sys.argv[1:])
numbers = summarize([], 1.0) | step_metrics(Counters().as_dict() | {{"graphs": {{}}}}, None, None)
assert numbers["new"] == 0.002
records = [make_record([metrics_of()], configuration=name, output_sha256="x", input_len=8, ignore_eos=True, seed=0)
           for name in ("baseline", "v1")]
for record in records:
    record.metrics["new"] = numbers["new"]
saved(folder, *records)
summary = write_summary(folder)
assert "| news (ms)" in summary and "| 2.0" in summary, summary
assert ",new," in (folder / "summary.csv").read_text()
assert specbatch.load_run(folder).points.new.tolist() == [0.002, 0.002]
assert "| news (ms)" in compare(folder / "baseline", folder / "v1").markdown()
policy = folder / "policy.toml"
policy.write_text("[bounds]\\nnew = {{ at_most = 1 }}\\n")
assert load_policy(policy).bounds["new"].at_most == 1
place = folder / "v1/c4/r1"
file = place / "record.json"
file.write_text(file.read_text().replace('"new": 0.002', '"new": -0.002'))
with pytest.raises(specbatch.SpecbatchError, match="new should not be negative"):
    load_record("folder", place)
assert dict(glossary())["news"] == "It is new. Formula: a / b."
for path, text in pages(docs):
    assert "`new`" in text, path
"""


@pytest.mark.parametrize(
    ("module", "registry", "source"),
    first_quick(1, [("step_metrics", "OF_STEPS", "of_steps"), ("request_metrics", "OF_REQUESTS", "of_requests")]),
)
def test_all_follows_from_an_entry(tmp_path: Path, module: str, registry: str, source: str) -> None:
    script = ADDED.format(module=module, registry=registry, source=source)
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests/kit')!r}]\n"
    command = [sys.executable, "-c", paths + script, str(tmp_path), str(ROOT / "docs")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("key", ["first_draft_accept_rate", "corpus_accept_rate"])
def test_a_metric_is_named_in_one_file(key: str) -> None:
    assert files_naming(key) == {"specbatch/records/request_metrics.py"}


def test_files_that_choose_metrics_by_name() -> None:
    """All others read the registry. Counts and times of steps are not counted, as fields have their names, nor is the
    accept length, which is everywhere."""
    keys = {
        metric.key for metric in (*OF_REQUESTS, *OF_STEPS) if metric.decimals and metric.unit not in ("s", "tokens")
    }
    keys -= {"accept_length", *(item.name for item in fields(Counters))}
    named = set[str]().union(*map(files_naming, keys))
    own = {"specbatch/records/request_metrics.py", "specbatch/records/step_metrics.py"}
    assert named - own == {path for paths in CHOSEN_IN.values() for path in paths}
