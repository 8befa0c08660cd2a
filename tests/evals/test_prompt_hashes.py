"""The prompts of GSM8K tasks are those of lm-eval, question by question (`make_prompt_hashes.py` runs it)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from crossed import slow_but

from specbatch.evals.lm_eval_process import quiet
from specbatch.evals.options import EvalOptions
from specbatch.evals.prompts import task_prompts
from specbatch.evals.run import run_eval
from specbatch.evals.task import EvalTask, load_task
from specbatch.jobs.questions import bundled_questions

STORED = json.loads((Path(__file__).parent / "data" / "prompt_hashes.json").read_text())
ALL = {case["tasks"][0]: case for case in STORED["cases"] if "limit" not in case}
FIRST = [case for case in STORED["cases"] if "limit" in case]
# Both tasks have the same template and examples; these settings are quick with gsm8k.
PLATINUM = [
    case
    for case in FIRST
    if case["tasks"] == ["gsm8k_platinum"] and (case.get("num_fewshot") == 8 or case.get("apply_chat_template"))
]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def texts_of(loaded: EvalTask, limit: int | None = None) -> list[str]:
    with quiet():
        loaded.task.build_all_requests(limit=limit)
    prompts = {request.doc_id: request.args[0] for request in loaded.task.instances}  # one each, also with repeats
    return [prompts[number] for number in sorted(prompts)]


@pytest.mark.parametrize(("name", "count"), [("gsm8k", 1319), ("gsm8k_platinum", 1209)])
def test_every_prompt(name: str, count: int) -> None:
    prompts, _ = task_prompts(name, None, as_messages=False)
    texts = [str(prompt.value) for prompt in prompts]
    found = [digest(text)[:8] for text in texts]
    each = ALL[name]["each"]
    assert [place for place in range(count) if found[place] != each[8 * place :][:8]] == []
    assert (len(texts), digest(json.dumps(texts))) == (count, ALL[name]["sha256"])


@pytest.mark.parametrize(
    "case",
    slow_but([case for case in FIRST if case not in PLATINUM], FIRST),
    ids=lambda case: "-".join(map(str, case.values()))[:60],
)
def test_first_prompts(case: dict[str, Any]) -> None:
    [name], limit = case["tasks"], case["limit"]
    if case.get("apply_chat_template"):
        prompts, _ = task_prompts(name, None, as_messages=True)
        texts = [json.dumps(prompt.value) for prompt in prompts[:limit]]
    else:
        seed = case.get("fewshot_random_seed", 1234)
        texts = texts_of(
            load_task(name, num_fewshot=case.get("num_fewshot"), data=None, fewshot_data=None, seed=seed), limit
        )
    assert (len(texts), digest(json.dumps(texts))) == (case["prompts"], case["sha256"])


def test_prompts_of_published_tables_can_be_made_again(tmp_path: Path) -> None:
    """Those of gsm8k_platinum that say "from bundled gsm8k train (200 questions"."""
    shots = tmp_path / "shots.jsonl"
    shots.write_text("".join(json.dumps(row) + "\n" for row in bundled_questions("gsm8k_train").rows[:200]))
    task = load_task("gsm8k_platinum", num_fewshot=None, data=None, fewshot_data=shots, seed=1234)
    assert digest(json.dumps(texts_of(task)))[:16] == "7ea466acb6eb9546"


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_platinum"])
def test_prompts_of_an_evaluation(make_engine: Any, name: str) -> None:
    report = run_eval(make_engine(lambda prompt: "1"), EvalOptions(name, limit=3))
    assert "".join(row["prompt_hash"][:8] for row in report.questions) == ALL[name]["each"][:24]
