#!/usr/bin/env bash
# lm-eval's `samples` gives a question other few-shot examples than `limit` and a full run do.
#
# Versions: lm_eval 0.4.13, datasets 5.2.0
# Expected: question 2 has one prompt, whichever other questions are asked: examples are drawn with a fixed seed (1234).
# Seen: examples are drawn from one generator, question after question, so that question 2 gets those of question 0 if it
#   is asked alone. With `limit`, the questions before it draw first, and it keeps its own.
# Matters: reruns of single questions (a failed one, a sample by stratum, halves on two machines) are not comparable with
#   the full run question by question. In specbatch `--limit` and `--offset` keep the prompts of a full run; `--samples`
#   draws as lm-eval does, with a note (docs/evaluation.md, "Compared with lm-eval").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lm_eval==0.4.13 datasets==5.2.0
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" venv/bin/python - 2> errors <<'PYTHON' || { cat errors; exit 1; }
import datasets
import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

rows = datasets.Dataset.from_list([{"question": f"question {n}", "answer": f"answer {n}"} for n in range(40)])
task = {
    "task": "numbers",
    "custom_dataset": lambda **_: datasets.DatasetDict(test=rows.select(range(10)), train=rows.select(range(10, 40))),
    "output_type": "generate_until", "training_split": "train", "test_split": "test", "num_fewshot": 2,
    "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
}


class Silent(LM):
    loglikelihood = loglikelihood_rolling = None

    def generate_until(self, requests):
        return ["" for _ in requests]


def run(**chosen):
    """By logged doc_id: the question and the prompt."""
    manager = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(Silent(), tasks=[task], task_manager=manager, bootstrap_iters=0, **chosen)
    samples = found["samples"]["numbers"]
    return {one["doc_id"]: (one["doc"]["question"], one["arguments"][0][0]) for one in samples}


first, alone = run(limit=3), run(samples={"numbers": [2]})
for way, found in (("limit=3", first), ("samples=[2]", alone)):
    print(f"{way}: the prompt of question 2 is {found[2][1]!r}")
assert first[2][0] == alone[2][0] == "question 2"
assert first[2][1] != alone[2][1], "the question has the same examples now"
PYTHON
