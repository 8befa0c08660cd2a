#!/usr/bin/env bash
# lm-eval's HF backend applies the repetition_penalty of generation_config.json to greedy answers; temperature, top_p and top_k of the same file have no effect on them.
#
# Versions: lm_eval 0.4.13, transformers 5.23.0, accelerate 1.15.0, torch 2.13.0 (CPU)
# Expected: a task with `do_sample: false` and `temperature: 0.0` gets the most likely tokens, whatever values the model's
#   author recommends for sampling.
# Seen: a penalty of 1.1 in the file changes 7 of 8 answers. The results do not name it.
# Matters: chat models are published with such files (Qwen2.5-Instruct: repetition_penalty 1.05), so greedy scores of
#   this backend are not those of engines that take the task's arguments as they are, and speculative decoding looks as if
#   it changed the answers. specbatch does not apply the file, and its notes name what would have changed
#   (docs/evaluation.md, "Compared with lm-eval").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lm_eval==0.4.13 transformers==5.23.0 accelerate==1.15.0 \
  torch==2.13.0
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" venv/bin/python - 2> errors <<'PYTHON' || { cat errors; exit 1; }
import json
from pathlib import Path

import datasets
import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=256,
    num_key_value_heads=2,
)
model = transformers.LlamaForCausalLM(config)
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
rows = datasets.Dataset.from_list([{"text": f"Count from {n}:"} for n in range(8)])
task = {
    "task": "counts", "custom_dataset": lambda **_: datasets.DatasetDict(test=rows), "test_split": "test",
    "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "", "num_fewshot": 0,
    "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["</s>"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 24},
}


def answers(**values):
    """values: of generation_config.json."""
    model.save_pretrained("model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained("model")
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": 256} | values))
    lm, manager = HFLM("model", device="cpu", dtype="float32"), TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0)
    return [sample["resps"][0][0] for sample in found["samples"]["counts"]]


plain, sampling = answers(), answers(do_sample=True, temperature=0.7, top_p=0.8, top_k=20)
penalized = answers(repetition_penalty=1.1)
changed = sum(one != other for one, other in zip(plain, penalized))
print(f"repetition_penalty 1.1: {changed} of {len(plain)} greedy answers changed")
assert sampling == plain, "sampling values change greedy answers now"
assert changed >= 6, "the penalty of the file is not applied now"
PYTHON
