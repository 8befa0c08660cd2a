#!/usr/bin/env bash
# lm-eval's `--samples` asks questions in the order of the data and labels them in the order of the list.
#
# Versions: lm_eval 0.4.13, datasets 5.2.0, Python 3.11.
# Expected: with '{"task": [7, 2]}' the logged samples with doc_id 7 and 2 are questions 7 and 2.
# Seen:     doc_id 7 has question 2 and doc_id 2 has question 7. The scores are right; a list without an order, as a
#           random subset is, gives nearly every logged sample another question's number. An empty list asks all
#           questions.
# Matters:  pairing two runs by doc_id, as for McNemar's test, compares different questions; doc_hash tells them apart.
#           specbatch takes a list in any order, numbers the questions as in the data, and refuses an empty list.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lm_eval==0.4.13 datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager


class Model(LM):
    def generate_until(self, requests, **_):
        return ["" for _ in requests]

    loglikelihood = loglikelihood_rolling = generate_until


Path("rows.jsonl").write_text("".join(json.dumps({"q": f"question {n}", "a": str(n)}) + "\n" for n in range(9)))
Path("mine.yaml").write_text("""
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
""")
task = TaskManager(include_path=".", include_defaults=False).load(["mine"])


def asked(numbers):
    results = evaluate(Model(), task, samples={"mine": numbers}, bootstrap_iters=0)
    return [(sample["doc_id"], sample["doc"]["q"]) for sample in results["samples"]["mine"]]


print("samples [2, 7]:", asked([2, 7]))
print("samples [7, 2]:", asked([7, 2]))
print("samples []:    ", len(asked([])), "questions")
assert asked([7, 2]) == [(7, "question 2"), (2, "question 7")], "the numbers are those of the questions"
assert len(asked([])) == 9, "an empty list asks nothing"
PYTHON
echo "ok: the questions have each other's numbers"
