#!/usr/bin/env bash
# auto-round's export to AWQ quantizes layers in groups of another size as asked, and does not write which.
#
# Versions: auto-round 0.16.1, transformers 5.24.0, torch 2.13.0
# Expected: settings of single layers (`layer_config`) are in config.json, or are refused for a format that has no place
#   for them.
# Seen: with group_size=32 and layer_config={"down_proj": {"group_size": 64}} the file has groups of 64 in down_proj, and
#   config.json has group_size 32 only. The formats "auto_round" and "auto_gptq" write the layers.
# Matters: readers see scales of a wrong shape. specbatch refuses the file by the name of the tensor; export it with
#   format="auto_round:auto_awq".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip torch==2.13.0
echo torch==2.13.0 > "$folder/constraints.txt"
pip -c "$folder/constraints.txt" auto-round==0.16.1 transformers==5.24.0
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w2", unk_token="w0")
for form in ("auto_awq", "auto_round:auto_awq"):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=128,
    )
    tool = AutoRound(
        LlamaForCausalLM(config).half(), tokenizer, bits=4, group_size=32, iters=0, nsamples=4, seqlen=32,
        dataset=list(torch.randint(3, 64, (4, 32)).split(1)), layer_config={"down_proj": {"group_size": 64}},
        device_map="cpu",
    )
    _, written = tool.quantize_and_save(f"{sys.argv[1]}/{form.replace(':', '-')}", format=form)
    written = Path(written[0] if isinstance(written, list) else written)
    groups = len(load_file(written / "model.safetensors")["model.layers.0.mlp.down_proj.scales"])
    text = json.dumps(json.loads((written / "config.json").read_text())["quantization_config"])
    print(form, "groups of 128 inputs:", groups, "config.json:", text)
    assert groups == 2
    assert '"group_size": 32' in text
    assert ('"group_size": 64' in text) == (form != "auto_awq")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"
