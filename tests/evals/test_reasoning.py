"""Tasks of reasoning-gym: prompts, scores and refusals."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from specbatch.errors import SpecbatchError
from specbatch.evals.run import EvalOptions, run_eval
from specbatch.evals.task import load_task


class Doubles:
    """A generator like those of reasoning-gym; every seventh item repeats the first."""

    def __init__(self, size: int, seed: int) -> None:
        assert size <= 120

    def __getitem__(self, place: int) -> dict[str, Any]:
        number = place if place % 7 else 0
        return {"question": f"double {number}", "answer": f"[{2 * number}, 0]", "metadata": {"number": number}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Half a point for the right size of a wrong answer, as reasoning-gym's own scorers may give."""
        return 1.0 if answer == f"[{2 * entry['metadata']['number']}, 0]" else 0.5


@pytest.fixture
def gym(use_packages: Any) -> None:
    module, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"doubles": Doubles, "composite": broken}  # type: ignore[attr-defined]
    module.create_dataset = lambda name, **kwargs: factory.DATASETS[name](**kwargs)  # type: ignore[attr-defined]
    use_packages({"reasoning_gym": module, "reasoning_gym.factory": factory})


def test_scored_by_the_generators_own_scorer(gym: None, make_engine: Any) -> None:
    def reply(prompt: str) -> str:
        number = int(prompt.rsplit("double ", 1)[1].split("\n")[0])
        return f" [{2 * number if number < 5 else 1}, 0]"

    engine = make_engine(reply)
    report = run_eval(engine, EvalOptions("reasoning_gym:doubles", limit=7, num_fewshot=17))
    (score,) = report.scores
    assert (score.metric, score.n) == ("score", 7)
    assert score.value == pytest.approx((5 * 1.0 + 2 * 0.5) / 7)
    prompt = engine.tokenizer.decode(engine.calls[0]["prompts"][0])
    assert prompt.count("Question: ") == 18
    assert prompt.count("double 0\n") == 1  # the scored one; its three copies among the examples are left out
    assert prompt.count(", 0]\n\n") == 17  # an answer that looks like a list stays whole


def broken(**_: Any) -> None:
    raise AssertionError("Must specify at least one dataset")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("composite", r"has no default settings \(Must specify"),
        ("double", "no such generator; use for example doubles"),
    ],
)
def test_generators_that_cannot_be_used_are_refused(gym: None, name: str, message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        load_task(f"reasoning_gym:{name}", num_fewshot=None, data=None, fewshot_data=None, seed=1234)


def test_missing_extra_is_refused(use_packages: Any) -> None:
    use_packages({"reasoning_gym": None})
    with pytest.raises(SpecbatchError, match=r"pip install 'specbatch\[reasoning\]'"):
        load_task("reasoning_gym:chain_sum", num_fewshot=None, data=None, fewshot_data=None, seed=1234)
