"""Options that would have no effect on a task, and generation arguments that replace those of the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import SpecbatchError
from specbatch.evals.report import EvalReport
from specbatch.evals.run import EvalOptions, prepare


def test_generation_arguments_update_those_of_the_task(make_engine: Any, evaluate: Any, tmp_path: Path) -> None:
    engine, folder = make_engine(lambda prompt: " 100.\nEnd"), tmp_path / "out"
    text = "until=['End'],max_gen_toks=9,repetition_penalty=1.2,temperature=0.5"
    found = evaluate(engine=engine, gen_kwargs=text, limit=2, output=folder)
    (params, _) = engine.calls[0]["params"]
    assert (params.stop, params.max_new_tokens, params.temperature) == (("End", "<|im_end|>"), 9, 0.0)
    assert params.repetition_penalty == 1.2
    assert found.record.workload["sampling"] == {"temperature": 0.0, "repetition_penalty": 1.2}
    assert found.notes == ["temperature=0.5 has no effect, because of do_sample=False; add do_sample=True"]
    assert f"Answers: up to 9 tokens, greedy, repetition-penalty 1.2. gen_kwargs: {text}." in found.table()
    assert "Note: temperature=0.5 has no effect" in found.table()
    assert EvalReport.load(folder) == found
    evaluate(engine=engine, gen_kwargs='{"do_sample": true, "temperature": 0.5}', temperature=0.7, limit=1)
    assert engine.calls[1]["params"][0].temperature == 0.7


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"gen_kwargs": "num_beams=4"}, r"gen_kwargs='num_beams=4': sets num_beams=4, which the engine does not"),
        ({"gen_kwargs": "do_sample=True"}, r"task='gsm8k': sets do_sample=True without a temperature"),
        ({"gen_kwargs": "oops"}, r"gen_kwargs='oops': expected `key=value`"),
        ({"fewshot_as_multiturn": True}, r"fewshot_as_multiturn=True: turns need a chat template; add chat_template"),
        ({"task": "one_digit_choices", "gen_kwargs": "top_k=1"}, r"gen_kwargs='top_k=1': task .* scores given texts"),
        ({"task": "one_digit_choices", "truncate_prompts": True}, r"truncate_prompts=True: task .* scores given texts"),
        ({"task": "one_digit_choices", "think_end_token": "x"}, r"think_end_token='x': task .* scores given texts"),
    ],
)
def test_options_for_prompts_and_answers_that_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecbatchError, match=f"^{complaint}"):
        prepare(EvalOptions(**({"task": "gsm8k"} | options)))


def test_sampling_without_an_effect_is_refused() -> None:
    with pytest.raises(SpecbatchError, match=r"^top_p=0.9: greedy answers are not sampled; add a temperature"):
        prepare(EvalOptions("one_digit_sums", top_p=0.9))
    with pytest.raises(SpecbatchError, match=r"^temperature=0.0: task one_digit_choices .* scores given texts"):
        prepare(EvalOptions("one_digit_choices", temperature=0.0))
