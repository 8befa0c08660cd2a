"""The bundled task of one-digit sums, as text and as multiple choice."""

from __future__ import annotations

from typing import Any

from specbatch.evals.run import EvalOptions, run_eval
from specbatch.evals.tasks.one_digit_sums import SCORED, rows, splits


def test_every_expression_once_with_its_value() -> None:
    made = rows()
    assert len({row["question"] for row in made}) == len(made) == 200
    for row in made:
        left, sign, right = row["question"].split()
        assert len(left) == len(right) == 1
        assert int(row["answer"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_always_the_same_items() -> None:
    assert rows() == rows()
    assert [row["question"] for row in rows()[:4]] == ["6 - 5", "9 - 0", "1 + 1", "8 + 6"]


def test_examples_are_never_scored() -> None:
    made = splits()
    assert len(made["test"]) == SCORED == 100
    assert not set(made["test"]["question"]) & set(made["train"]["question"])


def test_scores_and_prompts(make_engine: Any) -> None:
    def reply(prompt: str) -> str:
        left, sign, right = prompt.rsplit("problem: ", 1)[1].split(" =")[0].split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        return f" {value}\n\nQuestion: 1" if sign == "+" else f" Is it 77? It is {value}"

    engine = make_engine(reply)
    report = run_eval(engine, EvalOptions("one_digit_sums", limit=20))
    plus = sum("+" in row["question"] for row in rows()[:20])
    assert 0 < plus < 20
    strict, flexible = report.scores
    assert (strict.filter, strict.value, strict.unparsed) == ("strict-match", plus / 20, (20 - plus) / 20)
    assert (flexible.filter, flexible.value, flexible.unparsed) == ("flexible-extract", 1.0, 0.0)
    assert (report.num_fewshot, report.fewshot_source) == (5, "the task's train rows")
    prompts = [engine.tokenizer.decode(prompt) for prompt in engine.calls[0]["prompts"]]
    examples = rows()[SCORED : SCORED + 5]
    form = "Question: State the final answer to the following arithmetic problem: {} =\nAnswer:"
    shared = "".join(f"{form.format(row['question'])} {row['answer']}\n\n" for row in examples)
    assert prompts[0] == shared + form.format(rows()[0]["question"])
    assert all(prompt.startswith(shared) for prompt in prompts)


def test_same_sums_as_multiple_choice(make_engine: Any) -> None:
    """Four different numbers; the right one is at each place about equally often."""
    engine = make_engine(lambda prompt: f" {eval(prompt.rsplit(': ', 1)[1].split(' =')[0])}")
    report = run_eval(engine, EvalOptions("one_digit_choices"))
    assert report.scores[0].value == 1.0
    assert all(len({choice["text"] for choice in row["choices"]}) == 4 for row in report.questions)
    assert all(row["target"] == row["picked"] for row in report.questions)
    places = [[choice["text"] for choice in row["choices"]].index(row["target"]) for row in report.questions]
    assert all(15 <= places.count(place) <= 35 for place in range(4))
