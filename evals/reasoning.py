"""reasoning-gym generators as lm-eval tasks: `reasoning_gym:chain_sum` and a hundred more (optional dependency)."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from specbatch.errors import refuse
from specbatch.extras import missing

SEED = 0
SCORED = 100
EXAMPLES = 20


def config(task: str) -> dict[str, Any]:
    """The configuration of lm-eval task `reasoning_gym:NAME`: 100 scored items, and 20 others for few-shot examples."""
    name = task.partition(":")[2]
    if reason := missing("reasoning"):
        raise refuse("task", task, reason)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=4) or sorted(DATASETS)[:4]
        raise refuse("task", task, f"no such generator; use for example {', '.join(near)}")
    try:
        items = reasoning_gym.create_dataset(name, size=SCORED + EXAMPLES, seed=SEED)
    except AssertionError as error:
        raise refuse("task", task, f"has no default settings ({error}); use another generator") from error
    made = [items[place] for place in range(SCORED + EXAMPLES)]
    rows = [{"index": n, "question": item["question"], "answer": str(item["answer"])} for n, item in enumerate(made)]
    scored = {row["question"] for row in rows[:SCORED]}

    def splits(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        examples = [row for row in rows[SCORED:] if row["question"] not in scored]
        return DatasetDict(train=Dataset.from_list(examples), test=Dataset.from_list(rows[:SCORED]))

    def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        return {"score": float(items.score_answer(results[0].strip(), made[doc["index"]]))}

    return {
        "task": task,
        "custom_dataset": splits,
        "output_type": "generate_until",
        "training_split": "train",
        "test_split": "test",
        "fewshot_split": "train",
        "num_fewshot": 5,
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "answer",  # the field itself: a template would turn the text "[1, 2]" into a list
        "process_results": process_results,
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "temperature": 0.0},
        "metadata": {"version": 1.0},
    }
