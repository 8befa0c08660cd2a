"""What a sweep and an evaluation in several configurations share: failures, interruptions, how they go on, warm-ups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossed import first_quick

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.evals.grid import Evaluation
from specbatch.evals.options import EvalOptions, GridOptions
from specbatch.records.store import load_record
from specbatch.records.sweep_plan import points, unfinished
from specbatch.sweeps.run.benchmark import Benchmark, SweepOptions
from specbatch.sweeps.run.configurations import named
from specbatch.sweeps.run.sweep import parts_of, run_parts, run_sweep, run_workloads
from specbatch.sweeps.workload.workloads import Workload

CONFIGS = named(EngineConfig(speculation=Speculation("ngram")), ("baseline", "v1", "v2"))
Make = Callable[..., Any]


class Run:
    """A run of CONFIGS at concurrency 2 and 3, twice each, whose folder has what was measured. lines: of its log."""

    def __init__(self, make: Make, folder: Path) -> None:
        self.make, self.folder, self.lines = make, folder, list[str]()
        self.seen: list[tuple[int, int]] = []

    def __call__(self, configs: dict[str, EngineConfig] = CONFIGS, *more: Path, **changes: Any) -> None:
        self.lines.clear()
        workloads = {folder: self.make((2, 3), 2, **changes) for folder in (self.folder, *more)}
        run_workloads(configs, workloads, log=self.lines.append, report=lambda *at, **_: self.seen.append(at))

    def measured(self, configs: dict[str, EngineConfig] = CONFIGS) -> list[tuple[str, int, int]]:
        """Configuration, concurrency and repeat of each point that has numbers."""
        every = [one for one in points(configs, self.make((2, 3), 2)) if one.is_finished(self.folder)]
        good = [one for one in every if load_record("output", one.folder(self.folder)).error is None]
        return [(one.configuration, one.concurrency, one.repeat) for one in good]


def all_of(*names: str) -> list[tuple[str, int, int]]:
    """In the order in which they run."""
    order = [(1, names), (2, names[::-1])]
    return [(name, concurrency, repeat) for concurrency in (2, 3) for repeat, own in order for name in own]


@pytest.fixture(params=["a sweep", pytest.param("an evaluation", marks=pytest.mark.slow)])  # test_grid is quick
def run(request: pytest.FixtureRequest, engines: Any, scored_file: Path, tmp_path: Path) -> Run:
    def sweep(concurrency: tuple[int, ...], repeats: int, output_len: int = 9) -> Benchmark:
        work = Workload(input_len=5, output_len=output_len, prompts_per_concurrency=2)
        return Benchmark(SweepOptions(concurrency, repeats, work))

    def evaluation(concurrency: tuple[int, ...], repeats: int, output_len: int = 9) -> Evaluation:
        task = EvalOptions("gsm8k", data=scored_file, num_fewshot=0, max_new_tokens=output_len)
        return Evaluation(GridOptions(task, concurrency, repeats, 2))

    if request.param == "a sweep":
        engines.reply = lambda text: "of random tokens"
    return Run(sweep if request.param == "a sweep" else evaluation, tmp_path / "out")


def test_points_are_measured_after_a_warm_up_at_each_concurrency(run: Run, engines: Any) -> None:
    run()
    assert run.measured() == all_of(*CONFIGS)
    assert unfinished(run.folder) == []
    assert (engines.loads, run.lines) == (1, [])
    for engine in engines.made.values():  # at 2 and at 3: a warm-up, and a measurement for each repeat
        asked = [(call["concurrency"], len(call["prompts"])) for call in engine.calls]
        assert [number for number, _ in asked] == [2, 2, 2, 3, 3, 3]
        assert [count for _, count in asked[1:3] + asked[4:]] == [4, 4, 6, 6]
    requests = len(CONFIGS) * 2 * (4 + 6)
    assert run.seen[-1] == (requests, requests)


def test_finished_points_are_not_run_again(run: Run, engines: Any) -> None:
    run()
    run()
    assert (engines.loads, run.lines) == (1, ["12 of 12 points are finished"])
    with pytest.raises(SpecbatchError, match=f"^output='{run.folder}': is of an? (sweep|evaluation) with another "):
        run(output_len=5)


def test_a_configuration_that_fails_leaves_the_others(run: Run, engines: Any) -> None:
    """It is not tried again at that concurrency, and the same command runs its points."""
    engines.broken = ("v1",)
    run()
    assert run.measured() == all_of("baseline", "v2")
    assert run.lines == ["failed: v1 at concurrency 2, repeat 1: MemoryError: no room"]
    assert len(engines.made["v1"].calls) == 2
    assert run.seen[-1] == (40, 40)
    engines.broken = ()
    run()
    assert run.measured() == all_of(*CONFIGS)
    assert run.lines == ["8 of 12 points are finished"]
    assert engines.made["baseline"].calls == []


def test_points_during_which_a_replica_was_lost_run_again(run: Run, engines: Any) -> None:
    engines.lost = ("v2",)
    run()
    assert run.measured() == all_of("baseline", "v1")
    reason = "1 replica ended and had to be replaced"
    assert run.lines == [f"failed: v2 at concurrency 2, repeat 1: {reason}"]
    engines.lost = ()
    run()
    assert run.measured() == all_of(*CONFIGS)


def test_an_interrupted_run_keeps_its_points_and_goes_on(run: Run, engines: Any) -> None:
    engines.stop_after = {"v1": 3}
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run.measured() == [("baseline", 2, 1)]
    engines.stop_after = {}
    run()
    assert run.measured() == all_of(*CONFIGS)
    assert run.lines == ["1 of 12 points are finished"]


GROUPS = {**CONFIGS, "two": replace(CONFIGS["v1"], data_parallel=2)}


def test_groups_that_cannot_share_weights_load_in_each_round(run: Run, engines: Any) -> None:
    """One after the other, in the other order in the next round."""
    run(GROUPS)
    assert engines.loads == 3  # 1, 2 and 1 again
    assert {*run.measured(GROUPS)} == {*all_of(*GROUPS)}


@pytest.mark.parametrize(("unbuilt", "others"), first_quick(1, [("two", [*CONFIGS]), ("baseline", ["two"])]))
def test_a_group_that_fails_leaves_the_other(run: Run, engines: Any, unbuilt: str, others: list[str]) -> None:
    """Whichever comes first. The points of a sweep have records with the error and their prompts."""
    engines.unbuilt = (unbuilt,)
    run(GROUPS)
    assert {*run.measured(GROUPS)} == {*all_of(*others)}
    for path in run.folder.glob("*/c2/r*/record.json"):
        record = load_record("output", path.parent)
        assert record.error == (None if record.workload["configuration"] in others else "MemoryError: no room")
        assert record.workload["prompts"] == 4
    engines.unbuilt = ()
    run(GROUPS)
    assert {*run.measured(GROUPS)} == {*all_of(*GROUPS)}


def test_prompts_of_a_sweep_are_made_once(engines: Any, watch: Any, tmp_path: Path) -> None:
    """For the check before it begins and all rounds of all groups; of several lengths one is kept at a time."""
    made = watch(Workload, "prompts", before=lambda work, *_: work.input_len)
    engines.reply = lambda text: "of random tokens"
    options = SweepOptions((2,), 2, Workload(input_len=5, output_len=9, prompts_per_concurrency=2))
    run_sweep(GROUPS, options, tmp_path)
    assert (len(made), engines.loads) == (1, 3)
    run_parts(CONFIGS, parts_of(options, "input_len", [5, 6]), "input_len", tmp_path / "parts")
    assert made[1:] == [6, 5, 6]


def test_several_workloads_share_the_engines(run: Run, engines: Any) -> None:
    other = run.folder.with_name("other")
    run(CONFIGS, other)
    assert engines.loads == 1
    assert unfinished(run.folder) == unfinished(other) == []
