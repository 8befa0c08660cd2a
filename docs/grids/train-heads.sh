#!/usr/bin/env bash
# Trains the drafts of qwen2.5-coder-1.5b.toml, on one GPU: docs/grids/train-heads.sh gsm8k_train.jsonl heads
# On an H200, three trainings at once make 2.4 to 3.7 steps a second each. After Ctrl-C the same command continues.
# heads/mtp is the model of all configurations.
set -euo pipefail
questions=$1 heads=$2
train() {
    local out=$heads/$1
    shift
    [ -e "$out/record.json" ] && [ ! -e "$out/training.pt" ] && return
    specbatch train-draft --model qwen2.5-coder-1.5b --dtype bfloat16 --max-len 1536 \
        --batch-tokens 8192 --held-out 64 --memory-fraction 0.3 --out "$out" "$@"
}
# Two examples before each question, where the evaluation has five: more of a batch are answers.
train eagle3 --task gsm8k --num-fewshot 2 --data "$questions" --max-new-tokens 256 --max-running 256 \
    --algorithm eagle3 --unroll 4 --steps 900
answers=$heads/eagle3/answers.jsonl
train dflash --answers "$answers" --algorithm dflash --block-size 8 --draft-layers 3 --anchors 64 --steps 1200 --lr 6e-4 &
train mtp --answers "$answers" --algorithm mtp --unroll 4 --steps 700 &
wait
train dspark --answers "$answers" --algorithm dspark --block-size 7 --draft-layers 3 --anchors 64 --steps 1200 --lr 6e-4 &
train dflash2 --answers "$answers" --algorithm dflash2 --block-size 8 --draft-layers 3 --anchors 64 --steps 1200 \
    --lr 6e-4 &
train peagle --answers "$answers" --algorithm peagle --unroll 7 --draft-layers 2 --steps 900 &
wait
