#!/usr/bin/env bash
# Among equal logits `argmax` takes the first token, and `topk(4)` and `argsort` begin with other ones.
#
# Versions: torch 2.13.0 (CPU).
# Expected: `topk(k).indices[0]` and `argsort(descending=True)[0]` are `argmax`, if not the k lowest indices.
# Seen: of 49,152 equal values argmax gives 0, topk(1) gives 0, topk(4) begins with 1, and argsort with an index in the
#   thousands.
# Matters: equal logits are common in BF16. The first child of a draft tree chosen by `topk` is then not the token that a
#   greedy target keeps, and a draft that equals its target is not accepted. specbatch breaks ties by the lowest index in
#   `argmax` and in `topk_logprobs` alike (docs/drafts.md, "How many tokens to draft").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch

for size in (8, 1000, 49_152):
    equal = torch.zeros(size)
    first = [equal.argmax().item(), equal.topk(1).indices[0].item(), equal.topk(4).indices[0].item()]
    first.append(equal.argsort(descending=True)[0].item())
    print(f"{size} equal values: argmax {first[0]}, topk(1) {first[1]}, topk(4) {first[2]}, argsort {first[3]}")
    assert first[0] == 0, "argmax does not take the first of equal values"
    assert first[2] != 0, "topk(4) begins with the first of equal values now"
PYTHON
