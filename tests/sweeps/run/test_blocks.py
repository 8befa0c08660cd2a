"""Sweeps on workers of a stand-in for Ray: whole blocks, lost workers, and how a sweep continues."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeActor, FakeRay

from specbatch import EngineConfig, SpecbatchError, Speculation
from specbatch.errors import FailedError
from specbatch.records.run_record import RunRecord
from specbatch.records.store import load_record
from specbatch.records.sweep_plan import Point, points
from specbatch.replicas.cluster import Cluster
from specbatch.sweeps.report.tables import write_summary
from specbatch.sweeps.run import blocks
from specbatch.sweeps.run.benchmark import Benchmark, SweepOptions
from specbatch.sweeps.run.sweep import run_sweep, run_workloads
from specbatch.sweeps.workload.workloads import Workload

BASE = EngineConfig(model="toy", load_format="dummy", device="cpu", prefix_cache=False)
CONFIGS = {"baseline": BASE, "v2": EngineConfig(**{**vars(BASE), "speculation": Speculation("ngram", "v2")})}
OPTIONS = SweepOptions((1, 2), 2, Workload("random", None, (6, 6), (5, 5), 1, 0))
CLUSTER = Cluster(least=1, most=2)
BLOCKS = [(concurrency, repeat) for concurrency in (1, 2) for repeat in (1, 2)]


class Runs:
    """What the workers of a stand-in for Ray measure. lose: called with a worker's number and a point after it."""

    def __init__(self, ray: FakeRay) -> None:
        self.ray = ray
        self.measured: list[tuple[int, Point]] = []
        self.lose = lambda worker, point: False

    def measure(self, engine: Any, point: Point, record: RunRecord) -> None:
        each = enumerate(actor.made.engines for actor in self.ray.actors)
        worker = next(number for number, engines in each if engine in (engines or {}).values())
        if self.lose(worker, point):
            self.ray.actors[worker].lose("node")
        self.measured.append((worker, point))

    def __call__(self, folder: Path, **how: Any) -> None:
        run_workloads(CONFIGS, {folder: Benchmark(OPTIONS, self.measure)}, cluster=CLUSTER, **how)


@pytest.fixture
def runs(fake_ray: FakeRay) -> Runs:
    return Runs(fake_ray)


def errors(folder: Path) -> list[str | None]:
    """Of the records of all points."""
    return [load_record("output", point.folder(folder)).error for point in points(CONFIGS, OPTIONS)]


def actors_ended(actors: list[FakeActor]) -> bool:
    return all(actor.is_lost for actor in actors)


@pytest.mark.slow
def test_each_block_is_measured_on_one_worker_and_all_end(runs: Runs, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    runs(tmp_path, report=lambda *at, **_: reported.append(at))
    assert "| v2 " in write_summary(tmp_path)
    assert errors(tmp_path) == [None] * 8
    assert len({point for _, point in runs.measured}) == len(runs.measured) == 8
    for block in BLOCKS:
        assert len({worker for worker, point in runs.measured if (point.concurrency, point.repeat) == block}) == 1
    assert {worker for worker, _ in runs.measured} == {0, 1}
    assert reported[-1] == (32, 32)
    assert actors_ended(runs.ray.actors)


def test_a_block_of_a_lost_worker_runs_again_on_another(runs: Runs, tmp_path: Path) -> None:
    runs.lose = lambda worker, point: worker == 0 and point.configuration == "v2"
    lines: list[str] = []
    runs(tmp_path, log=lines.append)
    assert errors(tmp_path) == [None] * 8
    assert len(runs.ray.actors) == 3
    assert "a worker ended (its node on 10.0.0.7 was lost); starting another" in lines
    lost = {(point.concurrency, point.repeat) for worker, point in runs.measured if worker == 0}
    assert len(lost) == 1
    again = {worker for worker, point in runs.measured if (point.concurrency, point.repeat) in lost}
    assert len(again) == 2  # all of its points again


@pytest.mark.slow
def test_a_block_that_ends_three_workers_is_named_and_the_same_command_runs_it(runs: Runs, tmp_path: Path) -> None:
    runs.lose = lambda worker, point: point == Point("v2", 1, 2, 1)
    named = "concurrency 2, repeat 1 ended 3 workers; the last: its node on 10.0.0.7 was lost; the same command"
    with pytest.raises(FailedError, match=named):
        runs(tmp_path)
    assert len(list(tmp_path.rglob("record.json"))) == 6
    runs.lose = lambda worker, point: False
    runs.measured.clear()
    runs.ray.actors.clear()
    runs(tmp_path)
    assert [point for _, point in runs.measured] == [Point("baseline", 0, 2, 1), Point("v2", 1, 2, 1)]
    shutil.rmtree(Point("v2", 1, 1, 2).folder(tmp_path))
    every = list(points(CONFIGS, OPTIONS))
    assert blocks.unfinished_blocks(every, tmp_path) == [(Point("v2", 1, 1, 2), Point("baseline", 0, 1, 2))]
    assert actors_ended(runs.ray.actors)


def test_what_a_worker_refuses_ends_the_sweep(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: EngineConfig(**{**vars(config), "kv_pages": 2, "page_size": 8}) for name, config in CONFIGS.items()}
    with pytest.raises(SpecbatchError, match=r"v2: input_len='6-6': .* the KV pool of 2 pages"):
        run_sweep(small, OPTIONS, tmp_path, cluster=CLUSTER)
    (model := tmp_path / "model").mkdir()
    here = {name: EngineConfig(**{**vars(config), "model": str(model)}) for name, config in CONFIGS.items()}
    monkeypatch.setattr(FakeActor, "begin", lambda actor: model.rmdir() if model.exists() else None)
    with pytest.raises(SpecbatchError, match=r"worker on 10.0.0.7 cannot find .*/model; put it in a folder"):
        run_sweep(here, OPTIONS, tmp_path / "new", cluster=Cluster())
    assert actors_ended(runs.ray.actors)
