"""Runs of several tasks, and groups of several types and few-shot counts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.evals.lm import SpecBatchLM
from specbatch.evals.options import EvalOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.run import run_eval
from specbatch.evals.several import SeveralReports, folders_of, prepare_several
from specbatch.records.mcnemar import changes, pick_score
from specbatch.records.store import EARLIER

BOTH = "one_digit_sums,one_digit_choices"
ROWS = [{"q": f"{n} + 1 =", "a": str(n + 1), "c": [str(n), str(n + 1)], "g": 1} for n in range(5)]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {rows}, test: {rows}}}}}
training_split: train
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: {target}
output_type: {kind}
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
num_fewshot: {shots}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of the user, and a group of them with two types and three few-shot counts."""
    folder = tmp_path_factory.mktemp("mine")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, kind, shots, metric, target in (
        ("answers", "generate_until", 2, "exact_match", '"{{a}}"'),
        ("choices", "multiple_choice", 0, "acc", "g\ndoc_to_choice: c"),
        ("likely", "loglikelihood", 1, "acc", '" {{a}}"'),
    ):
        text = TASK.format(name=name, rows=rows, kind=kind, shots=shots, metric=metric, target=target)
        (folder / f"{name}.yaml").write_text(text)
    by = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
    (folder / "all.yaml").write_text(f"group: all_kinds\ntask: [choices, answers, likely]\n{by}\n")
    return folder


@pytest.fixture
def engine(make_engine: Any) -> Any:
    return make_engine(lambda prompt: " 1")


def run_all(engine: Any, options: EvalOptions) -> SeveralReports:
    every = prepare_several(options)
    with folders_of(every.values()):
        return SeveralReports({name: ready.run(engine) for name, ready in every.items()})


def test_each_task_has_a_folder_and_all_have_a_table(engine: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run_all(engine, EvalOptions(BOTH, limit=3, max_new_tokens=5, output=out))
    found.save(out)
    assert sorted(path.name for path in out.iterdir()) == [*sorted(BOTH.split(",")), "summary.csv", "summary.md"]
    for name, report in found.reports.items():
        assert EvalReport.load(out / name) == report
        alone = run_eval(engine, EvalOptions(name, limit=3))
        assert [row["prompt_hash"] for row in alone.questions] == [row["prompt_hash"] for row in report.questions]
    table = (out / "summary.md").read_text()
    assert table.index("strict-match") < table.index("acc_norm") < table.index("## one_digit_sums")
    assert len((out / "summary.csv").read_text().splitlines()) == 5
    assert {*found.as_dict()["tasks"]} == {*BOTH.split(",")}


def test_finished_tasks_are_not_run_again(engine: Any, tmp_path: Path) -> None:
    options = EvalOptions(BOTH, limit=3, output=tmp_path / "out")
    engine.stop_after = 2
    kept = (
        f"kept the finished answers of 1 of 2 tasks in {tmp_path / 'out'}; the same command with this --out continues"
    )
    with pytest.raises(KeyboardInterrupt, match=re.escape(kept)):
        run_all(engine, options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one_digit_sums"]
    engine.stop_after = None
    assert run_all(engine, options).reports["one_digit_sums"].record.workload[EARLIER] == 2
    engine.calls.clear()
    again = run_all(engine, options)
    assert (engine.calls, len(again.reports)) == ([], 2)
    with pytest.raises(SpecbatchError, match=r"^output=.*: exists and is not empty; name a new folder"):
        run_eval(engine, EvalOptions("one_digit_sums", output=tmp_path / "out"))
    with pytest.raises(SpecbatchError, match=r"has results of one_digit_sums as well, which its table would lose"):
        prepare_several(EvalOptions("one_digit_choices,gsm8k", output=tmp_path / "out"))


def test_only_interrupted_tasks_start_over(engine: Any, tmp_path: Path) -> None:
    options = EvalOptions(",".join(BOTH.split(",")[::-1]), limit=3, output=tmp_path / "out")
    first = run_all(engine, options).reports
    (tmp_path / "out/one_digit_sums/record.json").unlink()
    (tmp_path / "out/one_digit_sums/answers.partial.jsonl").touch()
    again = run_all(engine, replace(options, overwrite=True)).reports
    assert again["one_digit_choices"] == first["one_digit_choices"]
    assert again["one_digit_sums"].scores == first["one_digit_sums"].scores


def test_prompts_and_scores_of_several_tasks_are_lm_evals(make_engine: Any, no_env_info: None, mine: Path) -> None:
    import lm_eval.evaluator

    manager = lm_eval.tasks.TaskManager(include_path=mine, include_defaults=False)
    names = ["answers", "choices"]
    theirs = make_engine(lambda prompt: " 1")
    model = SpecBatchLM(theirs, "both")
    results = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, num_fewshot=1, bootstrap_iters=10)
    ours = make_engine(lambda prompt: " 1")
    found = run_all(ours, EvalOptions(",".join(names), include_path=(mine,), num_fewshot=1))
    assert ours.calls[0]["prompts"] == theirs.calls[0]["prompts"]
    assert ours.pairs == theirs.pairs
    for name, report in found.reports.items():
        (score,) = report.scores
        assert score.value == results["results"][name][f"{score.metric},none"]
        assert report.num_fewshot == results["n-shot"][name]
    assert found.reports["choices"].notes == ["num_fewshot=1 has no effect on choices: defined without examples"]


def test_a_group_of_several_types_has_lm_evals_score(
    make_engine: Any, no_env_info: None, mine: Path, tmp_path: Path
) -> None:
    import lm_eval.evaluator

    manager = lm_eval.tasks.TaskManager(include_path=mine, include_defaults=False)
    results = lm_eval.simple_evaluate(
        SpecBatchLM(make_engine(lambda prompt: " 1"), "all"), tasks=["all_kinds"], task_manager=manager
    )
    engine = make_engine(lambda prompt: " 1")
    out = tmp_path / "out"
    report = run_eval(engine, EvalOptions("all_kinds", include_path=(mine,), output=out))
    assert (report.kind, report.num_fewshot) == (
        "multiple_choice, generate_until, loglikelihood",
        {"choices": 0, "answers": 2, "likely": 1},
    )
    found = {score.task: score for score in report.scores}
    assert found[""].value == results["groups"]["all_kinds"]["acc,none"]
    assert found["answers"].value == results["results"]["answers"]["exact_match,none"]
    assert found[""].n == 10
    assert [row["doc_id"] for row in report.questions] == list(range(15))
    assert ["text" in row for row in report.questions] == [False] * 5 + [True] * 5 + [False] * 5
    assert report.truncated == 0.0
    assert EvalReport.load(out) == report
    assert "Few-shot examples: 0, 1, 2 from" in report.table()
    assert "| questions   | texts   | scored tokens   |" in report.table()
    assert changes(report, report, *pick_score(report, None, None)).changed == 0


def test_a_group_of_several_types_continues(engine: Any, mine: Path, tmp_path: Path) -> None:
    options = EvalOptions("all_kinds", include_path=(mine,), output=tmp_path / "out")
    whole, seen = run_eval(engine, EvalOptions("all_kinds", include_path=(mine,))), []
    score = engine.score

    def score_all(*given: Any, **how: Any) -> Any:
        engine.stop_after = None
        found = score(*given, **how)
        engine.stop_after = 2  # answers
        return found

    engine.stop_after = 4  # of 15 texts
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="kept the finished answers"):
            run_eval(engine, options)
        engine.score = score_all
    rows = [json.loads(line) for line in (tmp_path / "out/answers.partial.jsonl").read_text().splitlines()[1:]]
    assert len({row["index"] for row in rows}) == len(rows) == 17
    engine.score, engine.stop_after = score, None
    report = run_eval(engine, options, lambda *counts: seen.append(counts))
    assert seen[-1] == (20, 20)
    assert report.scores == whole.scores
    assert [row["scores"] for row in report.questions] == [row["scores"] for row in whole.questions]
    assert "17 of 20 results come from an interrupted run" in report.table()


def test_likelihood_tasks_of_a_run_that_drafts_score_with_the_target(engine: Any) -> None:
    drafts = EngineConfig(speculation=Speculation(algorithm="ngram"))
    for name, ready in prepare_several(EvalOptions(BOTH)).items():
        assert ready.engine_config(drafts) == drafts, name
    (alone,) = prepare_several(EvalOptions("one_digit_choices")).values()
    with pytest.raises(SpecbatchError, match=r"^algorithm='ngram': task one_digit_choices .* without drafting"):
        alone.engine_config(drafts)


@pytest.mark.parametrize(
    ("task", "options", "complaint"),
    [
        ("gsm8k,gsm8k", {}, "task='gsm8k,gsm8k': gsm8k is given twice"),
        (" , ", {}, "task=''"),
        (
            "answers,all_kinds",
            {},
            "task='answers,all_kinds': task answers is in answers and in all_kinds; name it once",
        ),
        ("one_digit_sums,nothing_such", {}, "task='nothing_such': no such task"),
        ("one_digit_choices,likely", {"max_new_tokens": 3}, "max_new_tokens=3: task one_digit_choices"),
        (
            "answers,likely",
            {"samples": {"choices": [0]}},
            "samples='choices': is no task of this run; use answers, lik",
        ),
    ],
)
def test_runs_that_cannot_be_are_refused(
    task: str, options: dict[str, Any], complaint: str, mine: Path, tasks_folder: Path
) -> None:
    with pytest.raises(SpecbatchError) as refused:
        prepare_several(EvalOptions(task, include_path=(mine,), **options))
    assert str(refused.value).startswith(complaint)


def test_samples_of_some_tasks_ask_all_of_the_others(engine: Any, mine: Path) -> None:
    report = run_eval(engine, EvalOptions("all_kinds", include_path=(mine,), samples={"likely": [4, 1]}))
    assert [row["doc_id"] for row in report.questions] == [*range(10), 11, 14]
    assert "samples name no questions of choices: all were asked" in report.notes


def test_answers_can_be_saved_without_scores(engine: Any, mine: Path, tmp_path: Path) -> None:
    options = {"include_path": (mine,), "predict_only": True, "output": tmp_path / "out"}
    report = run_eval(engine, EvalOptions("all_kinds", **options))
    assert report.scores == []
    assert {str(row["scores"]) for row in report.questions} == {"{'none': {}}"}
    assert report.questions[5]["text"] == " 1"
    assert "Note: answers were not scored (predict_only)." in report.table()
    assert EvalReport.load(tmp_path / "out") == report
    with pytest.raises(SpecbatchError, match=r"^task='all_kinds': was not scored \(predict_only\)"):
        pick_score(report, None, None)
    with pytest.raises(SpecbatchError, match="exists and is not empty"):
        run_eval(engine, EvalOptions("all_kinds", **options | {"predict_only": False}))


def test_prompts_are_shown_before_they_are_answered(engine: Any, mine: Path) -> None:
    (ready,) = prepare_several(EvalOptions("all_kinds", include_path=(mine,), write_out=True, offset=2)).values()
    lines: list[str] = []
    ready.run(engine, log=lines.append)
    assert [line.partition(", prompt")[0] for line in lines[::2]] == [
        f"task {name}, question 2" for name in ("choices", "answers", "likely")
    ]
    assert lines[0] == "task choices, question 2, prompt:\n2 + 1 ="
    assert lines[1::2] == ["target:\n1", "target:\n3", "target:\n 3"]


def test_without_resamples_there_are_no_standard_errors(engine: Any) -> None:
    assert {score.stderr for score in run_eval(engine, EvalOptions("one_digit_sums", bootstrap_iters=0)).scores} == {
        None
    }
