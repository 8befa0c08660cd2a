#!/usr/bin/env bash
# ModelOpt stores the scales of FP8 blocks with four dimensions, and those of a matrix of one block as a single number.
#
# Versions: nvidia-modelopt 0.47.0, transformers 5.14.1, torch 2.13.0 (CPU), Python 3.11.
# Expected: with blocks of 128 x 128 (`fp8_pb_wo`), scales of [rows / 128, columns / 128], as in DeepSeek's FP8 checkpoints.
# Seen: `weight_scale` is [rows / 128, 1, columns / 128, 1], and [] for a matrix of 128 x 128, in the same file.
# Matters: a reader that takes the number of dimensions for the kind of quantization reads small matrices as FP8 per tensor,
#   or refuses the file; one that takes two dimensions refuses all. specbatch reads both as blocks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" "$@" --quiet --disable-pip-version-check; }
pip install torch==2.13.0 numpy==2.4.0
echo torch==2.13.0 > "$folder/constraints.txt"
pip install -c "$folder/constraints.txt" "nvidia-modelopt[hf]==0.47.0" transformers==5.14.1
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
                     architectures=["LlamaForCausalLM"])
model = LlamaForCausalLM(config).bfloat16()
tokens = torch.randint(0, 64, (1, 16))
mtq.quantize(model, mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, lambda model: model(tokens))
export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(folder))
kind = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
stored = load_file(folder / "model.safetensors")
shapes = {}
for name, scale in stored.items():
    if name.endswith(".weight_scale"):
        values = stored[name.removesuffix("_scale")]
        assert values.dtype == torch.float8_e4m3fn
        shapes.setdefault(tuple(values.shape), set()).add(tuple(scale.shape))
print(kind, shapes)
assert kind == "fp8_pb_wo"
assert shapes == {(128, 128): {()}, (256, 128): {(2, 1, 1, 1)}, (128, 256): {(1, 1, 2, 1)}}, shapes
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/model" 2> "$folder/log" > "$folder/out" || { tail -20 "$folder/log"; exit 1; }
tail -1 "$folder/out"
echo "ok: scales of FP8 blocks of nvidia-modelopt 0.47.0 have four dimensions or none"
