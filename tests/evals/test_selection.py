"""Parts of the questions of a task: limit, offset and samples, compared with lm-eval's own selection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossed import slow_but

from specbatch.errors import SpecbatchError
from specbatch.evals.lm import SpecBatchLM
from specbatch.evals.options import EvalOptions
from specbatch.evals.run import prepare, run_eval

TASK = "sums"  # 2-shot, 40 questions
YAML = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{train: {rows}, test: {rows}}}}}
training_split: train
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
num_fewshot: 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sums")
    rows = made / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"{n} + 1 =", "a": str(n + 1)}) + "\n" for n in range(40)))
    (made / "sums.yaml").write_text(YAML.format(rows=rows))
    return made


@pytest.fixture
def asked(make_engine: Any, folder: Path) -> Any:
    """`asked(**options)`: the report and the prompts of a run of `TASK`."""

    def ask(**options: Any) -> tuple[Any, list[str]]:
        engine = make_engine(lambda prompt: " 1")
        report = run_eval(engine, EvalOptions(TASK, include_path=(folder,), **options))
        return report, [engine.tokenizer.decode(prompt) for prompt in engine.calls[-1]["prompts"]]

    return ask


@pytest.fixture
def lm_evals(make_engine: Any, folder: Path, no_env_info: None) -> Any:
    """`lm_evals(**options)`: what lm-eval's simple_evaluate makes of `TASK`, with the prompts."""
    import lm_eval.evaluator
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder, include_defaults=False)

    def evaluate(**options: Any) -> tuple[Any, list[str]]:
        engine = make_engine(lambda prompt: " 1")
        results = lm_eval.simple_evaluate(SpecBatchLM(engine, TASK), tasks=[TASK], task_manager=manager, **options)
        return results, [engine.tokenizer.decode(prompt) for prompt in engine.calls[-1]["prompts"]]

    return evaluate


def numbers(report: Any) -> list[int]:
    return [row["doc_id"] for row in report.questions]


def test_parts_have_the_prompts_of_the_whole(asked: Any) -> None:
    whole, prompts = asked(limit=9)
    assert len({prompt.rpartition("\n")[0] for prompt in prompts}) > 1  # the examples differ by question
    rows: list[Any] = []
    for offset, limit in ((0, 4), (4, 5)):
        part, own = asked(offset=offset, limit=limit)
        assert own == prompts[offset : offset + limit]
        assert (part.offset, part.limit, [score.n for score in part.scores]) == (offset, limit, [limit])
        rows += part.questions
    kept = ("doc_id", "prompt_hash", "target", "scores", "filtered")
    assert [{name: row[name] for name in kept} for row in rows] == [
        {name: row[name] for name in kept} for row in whole.questions
    ]
    last, _ = asked(offset=38)
    assert numbers(last) == [38, 39]
    assert ", from question 38 on. Few-shot examples: 2" in last.table()


@pytest.mark.parametrize("limit", slow_but([0.025, 1.0, 1000], [0.025, 0.999, 1.0, 3, 1000]))
def test_limits_are_lm_evals(limit: float, asked: Any, lm_evals: Any) -> None:
    report, prompts = asked(limit=limit)
    results, theirs = lm_evals(limit=limit)
    assert prompts == theirs
    assert results["n-samples"][TASK]["effective"] == len(report.questions)
    assert report.limit == limit


def test_samples_are_lm_evals_with_the_true_numbers(asked: Any, lm_evals: Any) -> None:
    report, prompts = asked(samples={TASK: [7, 0, 31]})
    results, theirs = lm_evals(samples={TASK: [0, 7, 31]})
    assert prompts == theirs
    assert prompts[1:] != [prompt for place, prompt in enumerate(asked(limit=32)[1]) if place in (7, 31)]
    assert numbers(report) == [0, 7, 31] == [row["doc_id"] for row in results["samples"][TASK]]
    assert [row["prompt_hash"] for row in report.questions] == [row["prompt_hash"] for row in results["samples"][TASK]]
    assert "3 questions of sums drew their few-shot examples by themselves" in report.table()
    assert asked(samples={TASK: [7, 0, 31]}, num_fewshot=0)[0].notes == []


def test_lm_evals_methods_are_restored(make_engine: Any, folder: Path) -> None:
    ready = prepare(EvalOptions(TASK, include_path=(folder,), limit=2))
    ready.run(make_engine(lambda prompt: " 1"))
    assert {"build_all_requests", "doc_iterator"}.isdisjoint(vars(ready.task.task))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"offset": 40}, "offset=40: task sums has 40 questions; use at most 39"),
        ({"samples": {TASK: [40, 3]}}, "samples=40: task sums has questions 0 to 39"),
        ({"samples": {"gsm8k": [3]}}, "samples='gsm8k': is no task of this run; use sums"),
        ({"samples": {TASK: [-1]}}, "samples=[-1]: of task sums: use a list of different question numbers"),
        *(
            ({"samples": {TASK: value}}, f"samples={value!r}: of task sums: use a list")
            for value in ([], [1, 1], ["1"], [1.0], [True], "12", 3, None)
        ),
        ({"samples": {TASK: [1]}, "limit": 3}, "limit=3: samples name the questions to ask; leave one of them out"),
        ({"samples": {TASK: [1]}, "offset": 3}, "offset=3: samples name the questions to ask; leave one of them out"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], complaint: str, folder: Path) -> None:
    with pytest.raises(SpecbatchError) as refused:
        prepare(EvalOptions(TASK, include_path=(folder,), **options))
    assert str(refused.value).startswith(complaint)
