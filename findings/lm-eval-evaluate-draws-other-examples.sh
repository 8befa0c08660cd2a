#!/usr/bin/env bash
# lm-eval's `evaluate` draws other few-shot examples at every call and puts them into one message; `simple_evaluate` does neither.
#
# Versions: lm_eval 0.4.13, datasets 5.2.0
# Expected: both functions make the same prompts of the same task: the one only loads it by name for the other. A task's
#   examples do not change from call to call.
# Seen: `evaluate` leaves the generator of the examples without a seed, so that two calls in one process differ;
#   `simple_evaluate` seeds it with 1234. With a chat template, fewshot_as_multiturn is off in the first function and on
#   in the second: one message with all examples, or two messages per example.
# Matters: scripts and adapters that load tasks themselves and call `evaluate` get new prompts at each run, and other
#   scores, and chat prompts that are not those of the command line.
#   specbatch seeds the examples and states both settings in its report (docs/evaluation.md, "Compared with lm-eval").
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

rows = datasets.Dataset.from_list([{"question": f"question {n}", "answer": f"answer {n}"} for n in range(200)])
task = {
    "task": "numbers",
    "custom_dataset": lambda **_: datasets.DatasetDict(test=rows.select(range(4)), train=rows.select(range(4, 200))),
    "output_type": "generate_until", "training_split": "train", "test_split": "test", "num_fewshot": 2,
    "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
}


class Recorder(LM):
    loglikelihood = loglikelihood_rolling = None
    tokenizer_name = "none"

    def generate_until(self, requests):
        self.prompts = [request.args[0] for request in requests]
        return ["" for _ in requests]

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return "".join(f"<{message['role']}>{message['content']}" for message in chat_history)

    def chat_template(self, name=False):
        return ""


def prompts(function, **options):
    recorder, manager = Recorder(), TaskManager(include_defaults=False)
    if function is lm_eval.evaluate:
        function(recorder, manager.load([task]), bootstrap_iters=0, **options)
    else:
        function(recorder, tasks=[task], task_manager=manager, bootstrap_iters=0, **options)
    return recorder.prompts


one, two = prompts(lm_eval.evaluate), prompts(lm_eval.evaluate)
print("evaluate:       ", repr(one[0]))
print("evaluate, again:", repr(two[0]))
print("simple_evaluate:", repr(prompts(lm_eval.simple_evaluate)[0]))
assert one != two, "evaluate draws the same examples now"
assert prompts(lm_eval.simple_evaluate) == prompts(lm_eval.simple_evaluate)
chat, simple = (prompts(way, apply_chat_template=True)[0] for way in (lm_eval.evaluate, lm_eval.simple_evaluate))
print("evaluate, chat:       ", repr(chat))
print("simple_evaluate, chat:", repr(simple))
assert (chat.count("<user>"), simple.count("<user>")) == (1, 3)
PYTHON
