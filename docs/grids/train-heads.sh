#!/usr/bin/env bash
# Trains the drafts of qwen2.5-coder-1.5b-drafts.toml, on one GPU:
#   docs/grids/train-heads.sh gsm8k_train.jsonl heads
#   docs/grids/train-heads.sh gsm8k_train.jsonl heads eagle3 dflash mtp   (only these)
# eagle3 writes the answers that the others train on: train it first, or with them. An H200 answers the questions in 90 s
# and trains three heads at once in about 4 minutes, all six in two such rounds. After Ctrl-C the same command continues.
# heads/mtp is the model of all configurations.
set -euo pipefail
[ $# -ge 2 ] || { sed -n "2,7s/^# *//p" "$0" >&2; exit 2; }
questions=$1 heads=$2
shift 2
all="eagle3 dflash mtp peagle dflash2 dspark"
names=" ${*:-$all} "
for name in $names; do
    [[ " $all " = *" $name "* ]] || { echo "$name: unknown; use some of $all" >&2; exit 2; }
done
[ -r "$questions" ] || { echo "$questions: cannot be read" >&2; exit 2; }
answers=$heads/eagle3/answers.jsonl
jobs=()
# Jobs in the background ignore Ctrl-C, so it is passed on.
trap 'trap - INT TERM; kill $(jobs -p) 2> /dev/null; wait; exit 130' INT TERM
train() { # NAME OPTIONS...: in the background, if it was asked for and is not finished
    local name=$1 out=$heads/$1
    shift
    [[ $names = *" $name "* ]] || return 0
    [ -e "$out/record.json" ] && [ ! -e "$out/training.pt" ] && return
    specbatch train-draft --model qwen2.5-coder-1.5b --dtype bfloat16 --max-len 1536 --batch-tokens 8192 \
        --held-out 64 --memory-fraction 0.3 --out "$out" --algorithm "$name" "$@" &
    jobs+=($!)
}
finish() { # waits for all jobs; if one has failed, this script fails
    local failed=0
    for job in "${jobs[@]}"; do wait "$job" || failed=$?; done
    jobs=()
    return $failed
}
answered() { [ -e "$answers" ] && [ "$(wc -l < "$answers")" -gt "$(wc -l < "$questions")" ]; } # a header, and a line each

# Two examples before each question, where the evaluation has five: more of a batch are answers.
train eagle3 --task gsm8k --num-fewshot 2 --data "$questions" --max-new-tokens 256 --max-running 256 --unroll 4 --steps 700
# The others train on the same answers.
until answered; do
    kill -0 "${jobs[@]}" 2> /dev/null || { finish; break; }
    sleep 1
done
train dflash --answers "$answers" --block-size 8 --draft-layers 3 --anchors 64 --steps 800 --lr 6e-4
train mtp --answers "$answers" --unroll 4 --steps 600
finish
train peagle --answers "$answers" --unroll 4 --steps 700
train dflash2 --answers "$answers" --block-size 8 --draft-layers 3 --anchors 64 --steps 800 --lr 6e-4
train dspark --answers "$answers" --block-size 7 --draft-layers 3 --anchors 64 --steps 800 --lr 6e-4
finish
