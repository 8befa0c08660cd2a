#!/usr/bin/env bash
# Trains the drafts of qwen2.5-coder-1.5b.toml, on one GPU: docs/grids/train-heads.sh gsm8k_train.jsonl heads
# An H200 answers the questions in 90 s and trains the three heads at once in about 4 minutes. After Ctrl-C the same
# command continues. heads/mtp is the model of all configurations.
set -euo pipefail
[ $# -eq 2 ] || { sed -n "2,4s/^# *//p" "$0" >&2; exit 2; }
questions=$1 heads=$2
# Jobs in the background ignore Ctrl-C, so it is passed on.
trap 'trap - INT TERM; kill $(jobs -p) 2> /dev/null; wait; exit 130' INT TERM
train() { # NAME OPTIONS...: in the background
    local out=$heads/$1
    shift
    [ -e "$out/record.json" ] && [ ! -e "$out/training.pt" ] && return
    exec specbatch train-draft --model qwen2.5-coder-1.5b --dtype bfloat16 --max-len 1536 \
        --batch-tokens 8192 --held-out 64 --memory-fraction 0.3 --out "$out" "$@"
}
# Two examples before each question, where the evaluation has five: more of a batch are answers.
train eagle3 --task gsm8k --num-fewshot 2 --data "$questions" --max-new-tokens 256 --max-running 256 \
    --algorithm eagle3 --unroll 4 --steps 700 &
eagle3=$!
answers=$heads/eagle3/answers.jsonl
# The others train on the same answers: one line each after a header.
until [ -e "$answers" ] && [ "$(wc -l < "$answers")" -gt "$(wc -l < "$questions")" ]; do
    kill -0 $eagle3 2> /dev/null || break
    sleep 1
done
train dflash --answers "$answers" --algorithm dflash --block-size 8 --draft-layers 3 --anchors 64 --steps 800 --lr 6e-4 &
dflash=$!
train mtp --answers "$answers" --algorithm mtp --unroll 4 --steps 600 &
mtp=$!
wait $eagle3
wait $dflash
wait $mtp
