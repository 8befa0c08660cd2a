"""Hashes of the prompts that lm-eval's `simple_evaluate` makes for GSM8K, without anything of specbatch.

    python tests/evals/make_prompt_hashes.py gsm8k_train.jsonl gsm8k_test.jsonl gsm8k_platinum_test.jsonl

The files are those of openai/grade-school-math (commit 3101c7d5) and of GSM8K-Platinum, with the sha256 below. They
stand in for the data sets of the hub, which is not reached. `prompt_hashes.json` has one entry per case: lm-eval's
arguments, the sha256 of all prompts and, for the two tasks as lm-eval runs them by default, eight digits of the sha256
of each prompt. `test_prompt_hashes.py` compares them with ours.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

OUT = Path(__file__).parent / "data" / "prompt_hashes.json"
SHA256 = (
    "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    "556e2c408a2e9fec354343d9ff256c03bd6ac59291e14be68e6789f0f53489b2",
)
CASES: list[dict[str, Any]] = [
    {"tasks": ["gsm8k"]},
    {"tasks": ["gsm8k_platinum"]},
    *({"tasks": [name], "limit": 40} for name in (
        "gsm8k_cot", "gsm8k_cot_llama", "gsm8k_cot_self_consistency", "gsm8k_cot_zeroshot",
        "gsm8k_platinum_cot", "gsm8k_platinum_cot_llama", "gsm8k_platinum_cot_self_consistency",
        "gsm8k_platinum_cot_zeroshot",
    )),
    *({"tasks": [name], "limit": 40, **how} for name in ("gsm8k", "gsm8k_platinum") for how in (
        {}, {"num_fewshot": 8, "fewshot_random_seed": 7}, {"apply_chat_template": True},
    )),
    {"tasks": ["gsm8k"], "limit": 40, "num_fewshot": 0},
    {"tasks": ["gsm8k_platinum"], "limit": 40, "num_fewshot": 3},
    {"tasks": ["gsm8k_platinum"], "limit": 40, "fewshot_random_seed": 0, "random_seed": 5, "numpy_random_seed": 6},
    {"tasks": ["gsm8k_cot"], "limit": 40, "num_fewshot": 3},
]  # fmt: skip


class Recorder(LM):
    """A model that keeps the prompts and answers nothing. Chats are kept as JSON."""

    tokenizer_name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = {request.doc_id: request.args[0] for request in requests}  # one each, also with repeats
        self.prompts = [prompts[number] for number in sorted(prompts)]
        return [""] * len(requests)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return json.dumps(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return ""

    def loglikelihood(self, requests: Any) -> Any:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: Any) -> Any:
        raise NotImplementedError


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main(train: str, test: str, platinum: str) -> None:
    rows = []
    for path, sha256 in zip((train, test, platinum), SHA256, strict=True):
        content = Path(path).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256, path
        rows.append([json.loads(line) for line in content.splitlines()])
    columns = ["question", "answer"]
    splits = [datasets.Dataset.from_list(part).select_columns(columns) for part in rows]
    hub = {
        "openai/gsm8k": datasets.DatasetDict(train=splits[0], test=splits[1]),
        "madrylab/gsm8k-platinum": datasets.DatasetDict(test=splits[2]),
    }
    datasets.load_dataset = lambda path, name: {"main": hub[path]}[name]
    folder = Path(lm_eval.__file__).parent / "tasks"
    manager = TaskManager(include_path=[folder / "gsm8k", folder / "gsm8k_platinum"], include_defaults=False)
    cases = []
    for case in CASES:
        model = Recorder()
        lm_eval.simple_evaluate(model, task_manager=manager, bootstrap_iters=0, **case)
        entry = case | {"prompts": len(model.prompts), "sha256": digest(json.dumps(model.prompts))}
        if "limit" not in case:
            entry["each"] = "".join(digest(prompt)[:8] for prompt in model.prompts)
        cases.append(entry)
    OUT.write_text(json.dumps({"lm_eval": version("lm_eval"), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
