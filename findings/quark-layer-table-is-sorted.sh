#!/usr/bin/env bash
# Quark takes the first pattern of layer_quant_config that fits a layer, and writes the table in alphabetical order.
#
# Versions: amd-quark 0.13, transformers 5.24.0, torch 2.13.0
# Expected: the config.json of an export says how each layer was quantized.
# Seen: with {"model.layers.0.*": FP8, "*down_proj": MXFP4} the down_proj of layer 0 is written in FP8. config.json has
#   "*down_proj" first, because transformers sorts the keys of tables, and so gives it MXFP4. Quark cannot load its own
#   export. The order is lost in the same way in `extra_config` of auto-round; GPTQModel 7.7 restores it.
# Matters: a reader of the table refuses the checkpoint, or reads values in another format. specbatch compares each layer
#   with the table and refuses by name; put the patterns in the order of the quantization in config.json, or use names
#   (docs/quantization.md, "Layers with formats of their own").
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
from pathlib import Path

import torch
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import FP8E4M3PerChannelSpec, OCP_MXFP4Spec, QConfig, QLayerConfig
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

plain, written = Path(sys.argv[1], "plain"), Path(sys.argv[1], "written")
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=128,
)
LlamaForCausalLM(config).bfloat16().save_pretrained(plain)
fp8 = QLayerConfig(weight=FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec())
mxfp4 = QLayerConfig(weight=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec())
table = {"model.layers.0.*": fp8, "*down_proj": mxfp4}
tool = ModelQuantizer(QConfig(global_quant_config=fp8, layer_quant_config=table, exclude=["lm_head"]))
model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
tokens = torch.arange(32)[None].repeat(2, 1)
export_safetensors(tool.freeze(tool.quantize_model(model, DataLoader(tokens, batch_size=1))), str(written))
stored = load_file(written / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
stated = list(json.loads((written / "config.json").read_text())["quantization_config"]["layer_quant_config"])
print("asked:", list(table), "written:", stated, "layer 0:", stored.dtype)
assert stored.dtype == torch.float8_e4m3fn
assert stated == sorted(table) != list(table)
try:
    import_model_from_safetensors(AutoModelForCausalLM.from_pretrained(plain), str(written), device="cpu")
except RuntimeError as error:
    print(str(error)[:300])
    assert "size mismatch for model.layers.0.mlp.down_proj.weight" in str(error)
else:
    raise SystemExit("Quark loaded it")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>&1 | grep -v QUARK-INFO
