"""Runs as pandas frames."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_record, metrics_of
from swept import swept

import specbatch
from specbatch import SpecbatchError
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord


def saved(record: RunRecord, folder: Path) -> None:
    folder.mkdir()
    record.save(folder)


def test_a_sweep_in_three_frames(tmp_path: Path) -> None:
    for place, (name, concurrency) in enumerate((("baseline", 1), ("v2", 1), ("v2", 4))):
        record = swept(name, concurrency)
        record.provenance = {"command": ["specbatch", "sweep", "a b"], "git": {"revision": "abc", "dirty": False}}
        record.hardware["driver"] = "580.1"
        saved(record, tmp_path / str(place))
    run = specbatch.load_run(tmp_path)
    assert run.points[["configuration", "concurrency"]].to_numpy().tolist() == [["baseline", 1], ["v2", 1], ["v2", 4]]
    assert set(METRICS) <= set(run.points)
    assert set(zip(run.points.command, run.points.revision, run.points.driver, strict=True)) == {
        ("specbatch sweep 'a b'", "abc", "580.1")
    }
    assert run.points.output_throughput.tolist() == [
        swept(name, concurrency).metrics["output_throughput"]
        for name, concurrency in (("baseline", 1), ("v2", 1), ("v2", 4))
    ]
    assert run.requests.groupby(["configuration", "concurrency"], sort=False).size().tolist() == [2, 2, 8]
    of_v2 = run.drafts[run.drafts.concurrency == 4]
    counts = swept("v2", 4).counters["acceptance"]
    assert of_v2.position.tolist() == [1, 2, 3, 4]
    assert of_v2.accepted.tolist() == counts["accepted"]
    assert set(run.drafts.configuration) == {"v2"}


def test_a_single_record_and_what_is_none(tmp_path: Path) -> None:
    saved(make_record([metrics_of()] * 3, configuration=None), tmp_path / "eval")
    run = specbatch.load_run(str(tmp_path / "eval"))
    assert (len(run.points), len(run.requests), len(run.drafts)) == (1, 3, 0)
    with pytest.raises(SpecbatchError, match=r"path='.*none': no such file or folder"):
        specbatch.load_run(tmp_path / "none")
