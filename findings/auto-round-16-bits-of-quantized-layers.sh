#!/usr/bin/env bash
# auto-round can write in `extra_config` that layers have 16 bits which it quantized to 4, and loads them at random.
#
# Versions: auto-round 0.16.1, transformers 5.24.0, torch 2.13.0
# Expected: config.json says which layers are quantized; a checkpoint that auto-round wrote loads in auto-round.
# Seen: with layer_config={"mlp": {"bits": 16}, "down_proj": {"bits": 4}} the last entry counts, so down_proj is quantized.
#   Layers that equal the whole config get no entry of their own, but the pattern ".*mlp.*" with 16 bits is written.
#   auto-round and transformers then load down_proj as an unquantized layer, whose weight is missing: it is initialized
#   at random, with a warning.
# Matters: a reader that believes the pattern computes another model. In specbatch weights that have scales are quantized,
#   whatever the table says.
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=128,
)
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w2", unk_token="w0")
tool = AutoRound(
    LlamaForCausalLM(config).half(), tokenizer, bits=4, group_size=32, iters=0, nsamples=4, seqlen=32, device_map="cpu",
    dataset=list(torch.randint(3, 64, (4, 32)).split(1)),
    layer_config={"mlp": {"bits": 16}, "down_proj": {"bits": 4}},
)
_, written = tool.quantize_and_save(sys.argv[1], format="auto_round")
written = Path(written[0] if isinstance(written, list) else written)
name = "model.layers.0.mlp.down_proj"
extra = json.loads((written / "config.json").read_text())["quantization_config"]["extra_config"]
print(extra)
assert f"{name}.qweight" in load_file(written / "model.safetensors")
assert extra[".*mlp.*"] == {"bits": 16} and name not in extra
loaded = [AutoModelForCausalLM.from_pretrained(written, device_map="cpu").get_submodule(name) for _ in range(2)]
print([type(layer).__name__ for layer in loaded], "equal:", torch.equal(*(layer.weight for layer in loaded)))
assert all(type(layer) is torch.nn.Linear for layer in loaded)
assert not torch.equal(*(layer.weight for layer in loaded))
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/written"
