#!/usr/bin/env bash
# The first `nn.Embedding`, `cat` or addition on the meta device imports torch._dynamo, more than 800 modules and a second.
#
# Versions: torch 2.13.0 (CPU).
# Expected: a model on the meta device takes microseconds per layer, because nothing is allocated or computed.
# Seen:     nn.Linear and views do, and `torch.cat` of two meta tensors, `nn.Embedding` (its normal_) and an addition
#           import torch._dynamo and sympy with more than 800 modules, once per process. On the CPU the same
#           calls import nothing.
# Matters:  who makes the skeleton of a model for its shapes or memory, such as in a command that should answer at once,
#           pays as much as for importing torch. specbatch reads the shapes of weights without calls on meta tensors
#           that need Python (specbatch/models/shape_recorder.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.0
cat >"$folder/run.py" <<'PYTHON'
import sys
import time

import torch

case, device = sys.argv[1:]
before, start = len(sys.modules), time.perf_counter()
with torch.device(device):
    if case == "embedding":
        torch.nn.Embedding(8, 8)
    elif case == "linear":
        torch.nn.Linear(8, 8)
    else:
        parts = [torch.empty(8), torch.empty(8)]
        if case == "cat":
            torch.cat(parts)
        elif case == "addition":
            parts[0] + 1
        else:
            parts[0].view(2, 4)
seconds, imported = time.perf_counter() - start, "torch._dynamo" in sys.modules
print(f"{case} on {device}: {len(sys.modules) - before} modules, {seconds:.2f} s, torch._dynamo {imported}")
wanted = device == "meta" and case in ("embedding", "cat", "addition")
sys.exit(imported != wanted)
PYTHON
for device in meta cpu; do
  for case in embedding cat addition linear view; do
    "$folder/venv/bin/python" "$folder/run.py" $case $device
  done
done
