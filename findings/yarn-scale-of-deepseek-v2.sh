#!/usr/bin/env bash
# transformers before 5.15 leaves YaRN's factor out of the softmax scale of DeepSeek-V2, and so gives other logits.
#
# Versions: transformers 5.14.1 and 5.15.1, torch 2.13.0 (CPU), Python 3.11.
# Expected: as in the model's own code and in the DeepSeek-V3 of the same versions, the softmax scale is multiplied by
#   (0.1 * mscale_all_dim * ln(factor) + 1)^2 if rope_scaling has mscale_all_dim.
# Seen: 5.14.1 multiplies by 1 and 5.15.1 by 1.59 (factor 40 and mscale_all_dim 0.707, as in DeepSeek-V2-Lite). The logits
#   of the same weights differ; with its scales multiplied by 1.59, 5.14.1 gives those of 5.15.1.
# Matters: scores and reference outputs of DeepSeek-V2 made with such a version are of a flatter attention, at every length
#   of the text, without a warning. specbatch multiplies, and its tests skip the comparison with such a version.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0 transformers==5.14.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder/5.15.1" transformers==5.15.1
cat > "$folder/logits.py" <<'PYTHON'
import math
import sys

import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

FACTOR, MSCALE_ALL_DIM = 40.0, 0.707
config = DeepseekV2Config(
    vocab_size=131, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=None, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1,
    max_position_embeddings=2560,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": FACTOR, "original_max_position_embeddings": 64,
        "mscale": MSCALE_ALL_DIM, "mscale_all_dim": MSCALE_ALL_DIM,
    },
)
model = DeepseekV2ForCausalLM(config).eval().float()
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.2 / parameter[0].numel() ** 0.5)
tokens = torch.randint(0, config.vocab_size, (1, 32), generator=generator)
layers = [layer.self_attn for layer in model.model.layers]
plain = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
expected = (0.1 * MSCALE_ALL_DIM * math.log(FACTOR) + 1) ** 2
with torch.no_grad():
    logits = model(tokens).logits
    factor = layers[0].scaling / plain
    for layer in layers:
        layer.scaling = plain * expected
    multiplied = model(tokens).logits
print(f"transformers {transformers.__version__}: the softmax scale is multiplied by {factor:.3f}; expected {expected:.3f}")
torch.save({"factor": factor, "expected": expected, "logits": logits, "multiplied": multiplied}, sys.argv[1])
PYTHON
"$folder/venv/bin/python" "$folder/logits.py" "$folder/old.pt"
PYTHONPATH="$folder/5.15.1" "$folder/venv/bin/python" "$folder/logits.py" "$folder/new.pt"
"$folder/venv/bin/python" - "$folder/old.pt" "$folder/new.pt" <<'PYTHON'
import sys

import torch

old, new = map(torch.load, sys.argv[1:])
difference = ((old["logits"] - new["logits"]).abs().max() / new["logits"].abs().max()).item()
left = ((old["multiplied"] - new["logits"]).abs().max() / new["logits"].abs().max()).item()
print(f"logits of 5.14.1 and 5.15.1 differ by {difference:.1%} of the largest; with the scale multiplied, by {left:.0e}")
assert abs(new["factor"] - new["expected"]) < 1e-6, "5.15.1 does not multiply the scale"
assert abs(old["factor"] - 1) < 1e-6, "5.14.1 multiplies the scale"
assert difference > 0.01, "the logits are the same"
assert left < 1e-5, "the logits differ for another reason"
PYTHON
echo "ok: transformers 5.14.1 leaves YaRN's factor out of DeepSeek-V2"
