"""The benchmark of a long job: its samples, rates and files."""

from __future__ import annotations

import csv

import pytest

from specbatch.errors import SpecbatchError
from specbatch.sweeps.microbench.job_memory import Sample, rate_between, tables


def test_job_is_sampled_and_plotted(tmp_path):
    (table,) = tables(prompts=20, max_running=4, new_tokens=2, out=tmp_path / "memory")
    (row,) = table.measured()
    assert row["prompts"] == 20
    samples = list(csv.DictReader((tmp_path / "memory.csv").read_text().splitlines()))
    assert list(samples[0]) == ["seconds", "rows", "rss_mib"]
    assert samples[-1]["rows"] == "20"
    assert "resident memory (MiB)" in (tmp_path / "memory.svg").read_text()


def test_rate_between_samples():
    samples = [Sample(0.0, 0, 1.0), Sample(1.0, 0, 1.0), Sample(2.0, 50, 1.0), Sample(4.0, 90, 1.0)]
    assert rate_between(samples, 0, 45) == 50
    assert rate_between(samples, 50, 90) == 20


def test_a_folder_that_is_missing_is_refused_before_the_job(tmp_path):
    with pytest.raises(SpecbatchError, match=r"out=.*there is no such folder"):
        list(tables(out=tmp_path / "missing" / "memory"))
