#!/usr/bin/env bash
# All tables of Qwen2.5-Coder-1.5B on one GPU, from the training of its drafts on:
#   docs/grids/qwen2.5-coder-1.5b.sh gsm8k_train.jsonl mt_bench_questions.jsonl humaneval_prompts.jsonl out/1.5b
# gsm8k_train.jsonl has question and answer in each line, mt_bench_questions.jsonl turns, humaneval_prompts.jsonl prompt.
# Interrupted, the same command continues: with the training, and with the points that are missing.
set -uo pipefail
[ $# -eq 4 ] || { sed -n "2,5s/^# *//p" "$0" >&2; exit 2; }
train=$1 mt_bench=$2 humaneval=$3 out=$4 grids=$(dirname "$0")
for file in "$train" "$mt_bench" "$humaneval"; do
    [ -r "$file" ] || { echo "$file: cannot be read" >&2; exit 2; }
done
mkdir -p "$out"
"$grids/train-heads.sh" "$train" "$out/heads" || exit
escaped=$(printf %s "$out" | sed 's/[&#\\]/\\&/g')
for file in "$grids"/qwen2.5-coder-1.5b*.toml; do
    sed "s#heads/#$escaped/heads/#; s#\"first\"#\"$escaped/first\"#" "$file" > "$out/${file##*/}"
done
how=(--model "$out/heads/mtp" --dtype bfloat16 --max-model-len 2304 --memory-fraction 0.85)
every=("${how[@]}" --configs "$out/qwen2.5-coder-1.5b.toml")  # all schedules
drafts=("${how[@]}" --configs "$out/qwen2.5-coder-1.5b-drafts.toml")  # v2 only
sampled=(--temperature 0.6 --top-p 0.95)
failed=0
run() { # NAME COMMAND...: `specbatch COMMAND`, unless it is finished
    local name=$1
    shift
    [ -e "$out/$name.done" ] && return
    specbatch "$@" --out "$out/$name" > "$out/$name.md"
    case $? in
        0) touch "$out/$name.done" ;;
        130) exit 130 ;; # Ctrl-C
        *) failed=1 ;;
    esac
}
score() { # NAME TASK OPTIONS...: the tables in results/ have answers of up to 512 tokens
    run "$1" eval "$2" --max-new-tokens 512 "${@:3}"
}
score gsm8k gsm8k "${every[@]}" --concurrency 1,8,32,128 --prompts-per-concurrency 6 --repeats 3
score gsm8k-all gsm8k "${drafts[@]}" --concurrency 128 --prefix-cache
score gsm8k-deterministic gsm8k "${drafts[@]}" --concurrency 64 --limit 400 --deterministic
score gsm8k-not-deterministic gsm8k "${drafts[@]}" --concurrency 64 --limit 400
score platinum gsm8k_platinum "${drafts[@]}" --concurrency 128 --prefix-cache
# One prompt for each request in flight: the 80 conversations of MT-Bench and the 164 prompts of HumanEval are few (at
# 128 requests, 48 conversations are asked twice).
loads=(--output-len 256 --concurrency 1,8,32,128 --prompts-per-concurrency 1)
grid=(--concurrency 1,8,32,128 --prompts-per-concurrency 3 --repeats 3)
run mt-bench sweep "${drafts[@]}" --dataset "$mt_bench" --prefix-cache "${loads[@]}"
run humaneval sweep "${drafts[@]}" --dataset "$humaneval" "${loads[@]}"
score gsm8k-drafts gsm8k "${drafts[@]}" "${grid[@]}"
score gsm8k-0.6 gsm8k "${drafts[@]}" "${grid[@]}" "${sampled[@]}"
run mt-bench-0.6 sweep "${drafts[@]}" --dataset "$mt_bench" --prefix-cache "${loads[@]}" "${sampled[@]}"
run humaneval-0.6 sweep "${drafts[@]}" --dataset "$humaneval" "${loads[@]}" "${sampled[@]}"
score reasoning reasoning_gym:chain_sum "${drafts[@]}" --concurrency 32
for head in dflash dspark eagle3; do
    score "budgets-$head" gsm8k "${how[@]}" --configs "$out/qwen2.5-coder-1.5b-budgets-$head.toml" \
        --concurrency 8,32,128 --prompts-per-concurrency 3 --repeats 3
done
score first gsm8k "${how[@]}" --spec off --limit 256 --concurrency 128
score corpus gsm8k "${how[@]}" --configs "$out/qwen2.5-coder-1.5b-corpus.toml" "${grid[@]}"
exit $failed
