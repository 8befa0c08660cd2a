#!/usr/bin/env bash
# auto-round writes negative scales for about half of the groups of symmetric INT4 weights.
#
# Versions: auto-round 0.16.1, torch 2.13.0
# Expected: scales of a symmetric quantization are positive; a sign is in the values only.
# Seen: about half of `scales` are negative. The value of largest magnitude of a group becomes -8 times the scale, whatever
#   its sign, so that the whole range of -8 to 7 is used.
# Matters: a reader that takes log2 or the absolute value of scales, checks that they are positive, or compares them with a
#   largest one without abs() reads such a target or draft as garbage, or refuses it. specbatch uses them as they are, in
#   every GEMM (docs/quantization.md, "INT4").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip torch==2.13.0
echo torch==2.13.0 > "$folder/constraints.txt"
pip -c "$folder/constraints.txt" auto-round==0.16.1
cat > "$folder/run.py" <<'PYTHON'
import torch
from auto_round.data_type.int import quant_tensor_sym

torch.manual_seed(0)
weight = torch.randn(64, 128)
meant, scales, zero = quant_tensor_sym(weight, bits=4, group_size=32)
share = (scales < 0).float().mean().item()
print(f"{share:.2f} of {scales.numel()} scales are negative, zero point {zero}, error {(meant - weight).abs().max():.3f}")
assert 0.35 < share < 0.65
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
