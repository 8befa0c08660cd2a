#!/usr/bin/env bash
# A layer whose settings in Quark lack `weight` is not quantized; documentation says that it takes the global ones.
#
# Versions: amd-quark 0.13, transformers 5.24.0, torch 2.13.0
# Expected: as the docstring of QLayerConfig says, None in the settings of a layer takes the value of
#   global_quant_config, so an entry that only changes `input_tensors` keeps the format of the weights.
# Seen: the weights of the layer stay in BF16. config.json has "weight": null for it.
# Matters: a reader that fills in the global settings looks for scales that the file does not have. In specbatch such a
#   layer is not quantized.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip torch==2.13.0
echo torch==2.13.0 > "$folder/constraints.txt"
pip -c "$folder/constraints.txt" amd-quark==0.13 transformers==5.24.0 accelerate
cat > "$folder/run.py" <<'PYTHON'
import json
import sys

import torch
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization import FP8E4M3PerTensorSpec, QConfig, QLayerConfig
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=128,
)
fp8 = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
whole, layer = QLayerConfig(weight=fp8), QLayerConfig(input_tensors=fp8)
tool = ModelQuantizer(QConfig(global_quant_config=whole, layer_quant_config={"*down_proj": layer}, exclude=["lm_head"]))
model = LlamaForCausalLM(config).bfloat16()
tokens = torch.arange(32)[None].repeat(2, 1)
export_safetensors(tool.freeze(tool.quantize_model(model, DataLoader(tokens, batch_size=1))), sys.argv[1])
found = load_file(f"{sys.argv[1]}/model.safetensors")
types = {name: found[f"model.layers.0.mlp.{name}.weight"].dtype for name in ("up_proj", "down_proj")}
with open(f"{sys.argv[1]}/config.json") as file:
    stated = json.load(file)["quantization_config"]["layer_quant_config"]["*down_proj"]["weight"]
print(types, "weight in config.json:", stated)
assert "will be used instead" in QLayerConfig.__doc__ and "``None``, the same as above" in QLayerConfig.__doc__
assert types == {"up_proj": torch.float8_e4m3fn, "down_proj": torch.bfloat16}
assert stated is None
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/written" 2>&1 | grep -v QUARK-INFO
