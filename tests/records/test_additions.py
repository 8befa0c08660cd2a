"""A metric is one entry of the registry: its number, its check, its columns and its documentation follow from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    [("request_metrics", "OF_REQUESTS", "of_requests"), ("step_metrics", "OF_STEPS", "of_steps")],
)
def test_all_follows_from_an_entry(tmp_path: Path, module: str, registry: str, source: str) -> None:
    script = ADDED.format(module=module, registry=registry, source=source)
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests/kit')!r}]\n"
    command = [sys.executable, "-c", paths + script, str(tmp_path), str(ROOT / "docs")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("key", ["first_draft_accept_rate", "corpus_accept_rate"])
def test_a_metric_is_named_in_one_file(key: str) -> None:
    files = [path for folder in ("specbatch", "evals", "sweeps") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if f'"{key}"' in path.read_text()] == ["request_metrics.py"]
