#!/usr/bin/env bash
# Trains the drafts of qwen2.5-coder-1.5b.toml, on one GPU: docs/grids/train-heads.sh gsm8k_train.jsonl heads
# The numbers of steps are computed for about two minutes each on an H200, and have not been tried there. Ctrl-C keeps
# what was trained; the same command resumes. heads/mtp is then the model of all configurations.
set -euo pipefail
questions=$1 heads=$2
train() {
    specbatch train-draft --model qwen2.5-coder-1.5b --dtype bfloat16 --max-len 512 --batch-tokens 4096 --held-out 64 "$@"
}
train --data "$questions" --max-new-tokens 256 --max-running 256 --algorithm eagle3 --unroll 5 --steps 1400 --lr 5e-4 \
    --out "$heads/eagle3"
answers=$heads/eagle3/answers.jsonl
train --answers "$answers" --algorithm dflash --block-size 8 --draft-layers 3 --anchors 64 --steps 1400 --lr 6e-4 \
    --out "$heads/dflash"
train --answers "$answers" --algorithm mtp --unroll 4 --steps 1000 --lr 5e-4 --out "$heads/mtp"
train --answers "$answers" --algorithm dspark --block-size 7 --draft-layers 3 --anchors 48 --steps 1200 --lr 6e-4 \
    --out "$heads/dspark"
train --answers "$answers" --algorithm dflash2 --block-size 8 --draft-layers 3 --anchors 64 --steps 1200 --lr 6e-4 \
    --out "$heads/dflash2"
train --answers "$answers" --algorithm peagle --unroll 7 --draft-layers 2 --steps 900 --lr 5e-4 --out "$heads/peagle"
