#!/usr/bin/env bash
# max_new_tokens in a model's generation_config.json wins over the max_length that is passed to generate().
#
# Versions: transformers 5.23.0, torch 2.13.0.
# Expected: arguments of a call replace the values of a configuration file, so a call with max_length=20 makes a text of
#           20 tokens, whatever the file says.
# Seen:     with max_new_tokens 3 in the file the call ends after 3 new tokens, with a log line that both are set. A
#           max_new_tokens in the call replaces it, and a max_length in the file does nothing.
# Matters:  lm-eval 0.4.13 passes max_length for its limit of answers, so with such a model neither a task's
#           max_gen_toks nor --gen_kwargs max_gen_toks=... has an effect, and longer answers are scored without their end.
#           `specbatch eval` does not apply the file and notes the key with the option that does.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$work/show.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1]) / "model"
torch.manual_seed(0)
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )
).save_pretrained(folder)
prompt = torch.tensor([[5, 6, 7, 8]])


def new_tokens(values, **call):
    (folder / "generation_config.json").write_text(json.dumps(values))
    model = LlamaForCausalLM.from_pretrained(folder)
    return model.generate(prompt, do_sample=False, **call).shape[1] - prompt.shape[1]


found = {
    "no limit in the file, max_length=20": new_tokens({}, max_length=20),
    "max_new_tokens 3 in the file, max_length=20": new_tokens({"max_new_tokens": 3}, max_length=20),
    "max_new_tokens 3 in the file, max_new_tokens=16": new_tokens({"max_new_tokens": 3}, max_new_tokens=16),
    "max_length 7 in the file, max_length=20": new_tokens({"max_length": 7}, max_length=20),
}
for case, count in found.items():
    print(f"{case}: {count} new tokens")
assert list(found.values()) == [16, 3, 16, 16], found
PY
"$work/venv/bin/python" "$work/show.py" "$work"
