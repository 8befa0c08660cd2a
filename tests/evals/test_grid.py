"""A task over configurations and concurrencies: its table, what is compared with what, failures and interruptions."""

from __future__ import annotations

import csv
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay
from lm_eval.api.task import ConfigurableTask

from specbatch.cli.report import SCORES, _grid
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError, refuse
from specbatch.evals.grid import Evaluation, each_task, load_grids, run_grids
from specbatch.evals.grid_table import Grid, load_grid
from specbatch.evals.options import GridOptions
from specbatch.evals.run import EvalOptions, run_eval
from specbatch.records.archive import pack, unpacked
from specbatch.records.runs import load_run
from specbatch.replicas.cluster import Cluster
from specbatch.sweeps.report.compare import compare
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.report.tables import markdown, table
from specbatch.sweeps.run.configurations import named

CONFIGS = named(EngineConfig(device="cpu", speculation=Speculation("ngram")), ("baseline", "v1", "v2"))
Run = Callable[..., Grid]


@pytest.fixture
def evaluate_all(engines: Any, scored_file: Path, shots_file: Path, tmp_path: Path) -> Run:
    def run(
        concurrency: tuple[int, ...] = (2,),
        repeats: int = 1,
        most: int | None = None,
        configs: Any = CONFIGS,
        **changes: Any,
    ) -> Grid:
        task = EvalOptions("gsm8k", data=scored_file, fewshot_data=shots_file, num_fewshot=3, **changes)
        options = GridOptions(task, concurrency, repeats, most)
        run.options = [options]  # type: ignore[attr-defined]
        return run_grids(configs, [options], tmp_path, report=lambda *at, **_: seen.append(at))["gsm8k"]

    seen: list[tuple[int, int]] = []
    run.seen = seen  # type: ignore[attr-defined]
    return run


def test_questions_that_do_not_fit_fail_their_configuration_unless_all_have_them(
    evaluate_all: Run, engines: Any
) -> None:
    """And the engine is not built, as it could answer none."""
    short = {name: replace(config, max_model_len=400) for name, config in CONFIGS.items()}
    reason = r"max_model_len=400: question 7 of gsm8k, the longest, has \d+ prompt"
    for configs in (short, short | {"baseline": CONFIGS["baseline"]}):  # all, and all that speculate
        with pytest.raises(SpecbatchError, match=reason):
            evaluate_all((2, 1), configs=configs)
    assert engines.loads == 0
    found = evaluate_all((2, 1), configs=CONFIGS | {"v2": short["v2"]})
    assert [row["configuration"] for row in found.rows()] == ["baseline", "v1"] * 2
    assert re.match(reason, found.left_out["v2"])


def test_table_has_accuracy_beside_speed(
    evaluate_all: Run, engines: Any, make_engine: Any, scored_file: Path, shots_file: Path, tmp_path: Path
) -> None:
    found = evaluate_all((1, 4))
    rows = found.rows()
    assert [(row["concurrency"], row["configuration"]) for row in rows] == [
        (n, name) for n in (1, 4) for name in CONFIGS
    ]
    assert [row.get("same_answers") for row in rows[:3]] == [None, 8, 7]
    assert [row["strict-match"] for row in rows] == [0.25] * 6
    assert rows[0]["strict-match stderr"] == pytest.approx((0.25 * 0.75 / 7) ** 0.5)
    assert (rows[2]["difference"], rows[2]["lost"], rows[2]["gained"], rows[2]["p"]) == (0.0, 0, 0, 1.0)
    assert rows[2]["speedup"] == pytest.approx(rows[2]["output_throughput"] / rows[0]["output_throughput"])
    assert evaluate_all.seen[-1] == (48, 48)  # type: ignore[attr-defined]
    for engine in engines.made.values():
        warm_up, measured = engine.calls[2:]
        assert ({params.max_new_tokens for params in warm_up["params"]}, warm_up["concurrency"]) == ({16}, 4)
        assert ({params.max_new_tokens for params in measured["params"]}, len(measured["prompts"])) == ({256}, 8)
        assert engine.forgotten == [1, 3]  # between warm-up and measurement
    main, details, model, settings, notes = found.table().split("\n\n")
    header, _, baseline, v1, _ = main.splitlines()[:5]
    assert [cell.strip() for cell in header.split("|")[3:-1]] == [
        *("speedup", "strict-match", "difference", "accept length", "TTFT (ms)", "TPOT (ms)", "tok/s", "verdict")
    ]
    assert [cell.strip() for cell in baseline.split("|")[3:7]] == ["-", "0.250 ± 0.164", "-", "-"]
    assert [cell.strip() for cell in v1.split("|")[3:7]] == ["1.00", "0.250 ± 0.164", "+0.000 (p = 1)", "2.500"]
    assert [line.split("|")[-2].strip() for line in (baseline, v1)] == ["-", "one repeat"]
    assert "75.0% unparsed" in details
    assert model.startswith("Model: fake, float32 on ")
    assert "Few-shot examples: 3 from shots.jsonl" in model
    assert settings.splitlines()[1].startswith("* v1: ngram, 4 drafted, schedule v1")
    assert "are of v1, v2 from baseline" in notes
    assert [row["speedup"] for row in csv.DictReader((tmp_path / "summary.csv").open())][:2] == ["", "1.0"]
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == rows
    # Few-shot examples are drawn at random, and an earlier run has drawn some already.
    alone = EvalOptions("gsm8k", data=scored_file, fewshot_data=shots_file, num_fewshot=3)
    wanted = run_eval(make_engine(lambda text: "?"), alone).prompts_sha256
    assert {one.prompts_sha256 for reports in found.reports.values() for one in reports} == {wanted}
    # the records alone, also packed, make the same table
    pack(tmp_path, tmp_path / "records.tar.xz")
    with unpacked("records", tmp_path / "records.tar.xz") as folder:
        kept = load_grid(folder)
        assert (kept.table(), kept.rows()) == (found.table(), rows)
    (tmp_path / "report").mkdir()
    again = _grid(tmp_path / "records.tar.xz")
    assert again is not None
    again.save(tmp_path / "report", SCORES)
    assert (tmp_path / "report" / SCORES[0]).read_text() == (tmp_path / "summary.md").read_text()
    # report and compare read the folder, and the archive
    compared, packed = (compare(path, path).rows for path in (tmp_path, tmp_path / "records.tar.xz"))
    assert {row.metric for row in compared} >= {"strict-match exact_match", "output_throughput"}
    assert [(str(row.place), row.metric) for row in packed] == [(str(row.place), row.metric) for row in compared]
    assert list(table(load_records(tmp_path)).ratio.round(2)) == [1.0] * 6
    points = load_run("run", tmp_path, lambda path: []).points
    assert {(key.configuration, key.size) for key in points} == {(name, n) for name in CONFIGS for n in (1, 4)}


def test_point_answers_as_many_questions_for_each_concurrent_request(evaluate_all: Run) -> None:
    """And never fewer than 4; a point of another number of questions has no answers in common to compare."""
    found = evaluate_all((1, 3, 4), most=2)
    rows = found.rows()
    assert [row["questions"] for row in rows] == [4] * 3 + [6] * 3 + [8] * 3
    assert [row.get("same_answers") for row in rows if row["configuration"] == "v1"] == [4, 6, 8]
    assert evaluate_all.seen[-1] == (54, 54)  # type: ignore[attr-defined]
    assert "4 to 8 answers per point, prompts sha256 of 4: " in found.table()
    assert evaluate_all((1, 3, 4), most=2).rows() == rows
    with pytest.raises(SpecbatchError, match="is of an evaluation with another"):
        evaluate_all((1, 3, 4), most=1)
    with pytest.raises(SpecbatchError, match="prompts_per_concurrency=0"):
        evaluate_all(most=0)


@pytest.mark.slow
def test_points_have_parts_of_the_questions(scored_file: Path) -> None:
    task = EvalOptions("gsm8k", data=scored_file, offset=3)

    def counts(task: EvalOptions, **how: Any) -> list[int]:
        options = GridOptions(task, (1, 2), **how)
        return [len(options.at(concurrency).questions("gsm8k", 40)) for concurrency in (1, 2)]

    assert counts(task) == [37, 37]
    assert counts(task, prompts_per_concurrency=3) == [4, 6]
    assert counts(replace(task, limit=5), prompts_per_concurrency=3) == [4, 5]
    assert counts(replace(task, limit=0.25)) == [10, 10]
    some = replace(task, offset=0, samples={"gsm8k": [7, 1, 9, 3, 5]})
    assert counts(some, prompts_per_concurrency=3) == [4, 5]
    assert GridOptions(some, (1,), prompts_per_concurrency=3).at(1).questions("gsm8k", 40) == [1, 3, 5, 7]
    with pytest.raises(SpecbatchError, match=r"^limit=0.25: with prompts_per_concurrency use a whole number"):
        GridOptions(replace(task, limit=0.25), (1,), prompts_per_concurrency=3)


def test_repeats_are_interleaved_and_give_an_interval(evaluate_all: Run) -> None:
    rows = evaluate_all(repeats=2).rows()
    assert [row["repeats"] for row in rows] == [2, 2, 2]
    assert (rows[1]["speedup_low"], rows[1]["speedup_high"]) == (1.0, 1.0)


def test_interrupted_grid_continues_with_the_missing_points(evaluate_all: Run, engines: Any, tmp_path: Path) -> None:
    engines.stop_after = {"v1": 3}
    with pytest.raises(
        KeyboardInterrupt, match=r"^kept 1 of 3 points in .*; the same command with this --out continues"
    ):
        evaluate_all()
    assert "baseline" in (tmp_path / "summary.md").read_text()
    engines.stop_after = {}
    rows = evaluate_all().rows()
    assert [row.get("same_answers") for row in rows[:3]] == [None, 8, 7]
    assert all(row["output_throughput"] for row in rows)
    with pytest.raises(SpecbatchError, match="is of an evaluation with another"):
        evaluate_all(temperature=0.6)
    assert evaluate_all().rows() == rows
    loads = engines.loads
    assert evaluate_all(overwrite=True).rows() == rows
    assert engines.loads == loads + 1


def test_failed_point_is_left_out_and_runs_again(evaluate_all: Run, engines: Any, tmp_path: Path) -> None:
    engines.broken = ("v1",)
    found = evaluate_all((2, 3))
    assert found.left_out == dict.fromkeys([f"v1 at concurrency {n}" for n in (2, 3)], "MemoryError: no room")
    assert [row["configuration"] for row in found.rows()] == ["baseline", "v2"] * 2
    assert "v1 at concurrency 2, v1 at concurrency 3: left out, MemoryError: no room" in found.table()
    assert load_grid(tmp_path).table() == found.table()
    assert evaluate_all.seen[-1] == (32, 32)  # type: ignore[attr-defined]
    engines.broken = ()
    assert [row["configuration"] for row in evaluate_all((2, 3)).rows()] == list(CONFIGS) * 2


def test_notes_explain_no_ratio_where_only_the_baseline_is_left(evaluate_all: Run, engines: Any) -> None:
    engines.broken = ("v1", "v2")
    found = evaluate_all((2,))
    assert "± standard error. TTFT and TPOT" in found.table()
    place, reports = next(iter(found.reports.items()))
    found.reports[place] = [replace(one, notes=["as in lm-eval", "greedy"]) for one in [*reports, *reports]]
    assert found.table().count(" Note: as in lm-eval. Note: greedy.") == 1


def test_what_all_points_refuse_is_refused_once(evaluate_all: Run, engines: Any) -> None:
    engines.broken, engines.error = tuple(CONFIGS), refuse("limit", 9, "use at most 8")
    with pytest.raises(SpecbatchError, match=r"^limit=9: use at most 8$"):
        evaluate_all((1, 2))


def test_task_with_different_prompts_in_each_run_is_refused(evaluate_all: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text_of, number = ConfigurableTask.doc_to_text, count()
    monkeypatch.setattr(ConfigurableTask, "doc_to_text", lambda *args: f"{next(number)} {text_of(*args)}")
    with pytest.raises(SpecbatchError, match="task='gsm8k': builds different prompts in each run"):
        evaluate_all()


def test_report_of_the_same_folder_has_the_same_speedups(evaluate_all: Run, tmp_path: Path) -> None:
    """Both have two bases, which differ in their prefill graphs as the configurations with speculation do."""
    more = named(EngineConfig(device="cpu", speculation=Speculation("ngram")), ("baseline+piecewise", "v2+piecewise"))
    every = CONFIGS | more
    evaluate_all((2,), repeats=2, configs=every)
    for number, path in enumerate(sorted(tmp_path.glob("*/c2/r*/record.json"))):
        body = json.loads(path.read_text())
        body["metrics"]["output_throughput"] = 100.0 + 17 * number**2 % 31
        path.write_text(json.dumps(body))
    evaluated = {row["configuration"]: row for row in load_grid(tmp_path).rows()}
    records = load_records(tmp_path)
    reported = table(records).set_index("configuration")
    assert list(reported.index) == list(every)
    assert reported.base.to_dict() == {name: row["base"] for name, row in evaluated.items()}
    assert reported.base["v2+piecewise"] == "baseline+piecewise"
    for name, row in list(evaluated.items())[1:]:
        ours = reported.loc[name]
        assert [ours.ratio, ours.ratio_low, ours.ratio_high, ours.ratio_verdict] == [
            row[key] for key in ("speedup", "speedup_low", "speedup_high", "verdict")
        ]
    text = markdown(records, table(records))
    assert "| speedup (95% interval) " in text
    assert "v2+piecewise is compared with baseline+piecewise, the others with baseline.\n" in text


def test_an_engine_that_cannot_be_built_is_left_out_by_name(
    engines: Any, scored_file: Path, shots_file: Path, tmp_path: Path
) -> None:
    task = EvalOptions("gsm8k", data=scored_file, fewshot_data=shots_file, num_fewshot=3)
    configs = {**CONFIGS, "two": replace(CONFIGS["v1"], data_parallel=2)}
    engines.unbuilt = ("two",)
    why = {"v2+piecewise": "needs a CUDA device"}
    [grid] = run_grids(configs, [GridOptions(task, (2,))], tmp_path, left_out=why).values()
    assert {name for _, name in grid.reports} == {*CONFIGS}
    assert grid.left_out == {**why, "two": "MemoryError: no room"}
    assert load_grid(tmp_path).table() == grid.table()


def test_several_tasks_have_a_folder_and_a_table_each(engines: Any, tmp_path: Path) -> None:
    """And samples of each."""
    engines.reply = lambda text: " 4"
    samples = {"gsm8k": [0, 7], "one_digit_sums": [1, 3, 5]}
    task = EvalOptions("gsm8k,one_digit_sums", num_fewshot=0, max_new_tokens=9, samples=samples)
    tasks = each_task(GridOptions(task, (2,)))
    found = run_grids(CONFIGS, tasks, tmp_path)
    assert [len(next(iter(grid.reports.values()))[0].questions) for grid in found.values()] == [2, 3]
    assert engines.loads == 1
    for name, grid in found.items():
        assert (tmp_path / name / "summary.md").read_text() == f"{grid.table()}\n"
    assert {name: grid.table() for name, grid in load_grids(tasks, tmp_path).items()} == {
        name: grid.table() for name, grid in found.items()
    }
    engines.broken = ("v1",)
    assert run_grids(CONFIGS, tasks, tmp_path).keys() == found.keys()
    assert engines.loads == 1
    with pytest.raises(SpecbatchError, match="has two tasks whose folders have the same name"):
        each_task(GridOptions(replace(task, task="a/x.yaml,b/x.yaml", samples=None), (2,)))


def test_workers_of_a_cluster_measure_the_points(
    evaluate_all: Run, engines: Any, fake_ray: FakeRay, tmp_path: Path
) -> None:
    """The results are those of this process. A worker loads the task itself."""
    rows = evaluate_all((2, 3)).rows()
    engines.broken = ("v1",)
    lines: list[str] = []
    [options] = evaluate_all.options  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(Evaluation(options)))
    assert again.options == options

    def run() -> Grid:
        how: Any = {"cluster": Cluster(least=1, most=1), "log": lines.append}
        return run_grids(CONFIGS, [options], tmp_path / "far", **how)["gsm8k"]

    found = run()
    assert found.left_out == {f"v1 at concurrency {size}": "MemoryError: no room" for size in (2, 3)}
    assert "concurrency 2, repeat 1: measured" in lines
    engines.broken = ()
    assert [row | {"engine": ""} for row in run().rows()] == [row | {"engine": ""} for row in rows]
    assert len(fake_ray.actors) == 2
