#!/usr/bin/env bash
# The majority vote of lm-eval counts answers in which no number was found, as votes for "[invalid]".
#
# Versions: lm_eval 0.4.13, Python 3.11.
# Expected: self-consistency votes among the final answers that were found; a sample without one has no vote.
# Seen:     in `maj@8` and `maj@64` of gsm8k_cot_self_consistency, samples without "The answer is N" share the text
#           "[invalid]", so they agree, while wrong numbers scatter. With 3 of 8 samples at 18 and 5 without a number the
#           vote is "[invalid]", which scores 0.
# Matters:  a shorter limit of new tokens or another stop string, which cut samples off before the number, turns right
#           votes into wrong ones, and looks like a loss of accuracy. specbatch votes as lm-eval does, and reports such
#           votes as unparsed ("Unparsed" in docs/evaluation.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps lm_eval==0.4.13 pyyaml==6.0.3
"$folder/venv/bin/python" - <<'PYTHON'
from pathlib import Path

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.filters import build_filter_ensemble

task = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k-cot-self-consistency.yaml"
chain = next(entry for entry in yaml.safe_load(task.read_text())["filter_list"] if entry["name"] == "maj@8")
steps = [(step.pop("function"), step) for step in chain["filter"]]
samples = ["She makes 18. The answer is 18."] * 3 + ["She eats three, bakes four, sells the others, and so"] * 5
question = Instance("generate_until", {}, (), 0, resps=samples)
build_filter_ensemble("maj@8", steps).apply([question])
vote = question.filtered_resps["maj@8"]
print("3 samples have 18, 5 have no number; the vote is", vote)
assert vote == "[invalid]", "the vote is among the numbers that were found"
PYTHON
echo "ok: samples without a number won the vote"
