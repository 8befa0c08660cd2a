#!/bin/bash
# Measures SGLang, vLLM and specbatch in the same rounds on one GPU. See docs/head-to-head.md.
#   bash docs/head-to-head.sh plain|eagle3|dflash|standalone [options of specbatch sweep]
# SGLANG and VLLM are the virtual environments of the servers. DUMMY=1: random weights, in mode plain.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n "2,4s/^# *//p" "$0" >&2; exit 2; }
mode=$1
shift
SGLANG=${SGLANG:-$HOME/venvs/sglang} VLLM=${VLLM:-$HOME/venvs/vllm}

model=Qwen/Qwen3-8B pages=11000 concurrency=1,8,32,128
work=(--input-len 1024 --output-len 256)
sgl=() vll=()
case $mode in
plain) ;;
eagle3)
    export SGLANG_SIMULATE_ACC_LEN=2.4 SGLANG_SIMULATE_ACC_METHOD=match-expected
    export SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token
    head=AngelSlim/Qwen3-8B_eagle3
    sgl=(--speculative-algorithm EAGLE3 --speculative-draft-model-path $head)
    sgl+=(--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4)
    vll=(--speculative-config "{\"method\": \"eagle3\", \"model\": \"$head\", \"num_speculative_tokens\": 3,
        \"rejection_sample_method\": \"synthetic\", \"synthetic_acceptance_rates\": [1.0, 0.4, 0.0]}")
    ;;
dflash)
    concurrency=1,8,32 pages=4000
    export SGLANG_SIMULATE_ACC_LEN=6.35 SGLANG_SIMULATE_ACC_METHOD=match-expected
    export SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token
    head=z-lab/Qwen3-8B-DFlash-b16
    sgl=(--speculative-algorithm DFLASH --speculative-draft-model-path $head)
    vll=(--speculative-config "{\"method\": \"dflash\", \"model\": \"$head\", \"num_speculative_tokens\": 15,
        \"rejection_sample_method\": \"synthetic\", \"synthetic_acceptance_length\": 6.35}")
    ;;
standalone)
    model=Qwen/Qwen2.5-Coder-1.5B-Instruct pages=16384
    work=(--dataset gsm8k --chat-template --output-len 256)
    head=Qwen/Qwen2.5-Coder-0.5B-Instruct
    sgl=(--speculative-algorithm STANDALONE --speculative-draft-model-path $head)
    sgl+=(--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5)
    vll=(--speculative-config "{\"method\": \"draft_model\", \"model\": \"$head\", \"num_speculative_tokens\": 4}")
    ;;
*) echo "unknown mode $mode" >&2 && exit 2 ;;
esac
weights=auto
if [ -n "${DUMMY:-}" ]; then
    [ "$mode" = plain ] || { echo "DUMMY=1 goes with plain: heads with random weights take other code paths" >&2 && exit 2; }
    weights=dummy
fi
most=${concurrency##*,}

servers=()
stop() { for server in "${servers[@]}"; do kill -- "-$server" 2>/dev/null || true; done; }
trap stop EXIT
wait_for() { # URL PID LOG
    until curl -sf "$1/health" >/dev/null; do
        kill -0 "$2" 2>/dev/null || { tail -40 "$3" && exit 1; }
        sleep 2
    done
}

out=out/head-to-head-$mode
mkdir -p "$out"
setsid "$SGLANG/bin/sglang" serve --model-path $model --port 30000 --load-format $weights \
    --dtype bfloat16 --context-length 4096 --max-running-requests "$most" --mem-fraction-static 0.35 \
    --max-total-tokens $((16 * pages)) --chunked-prefill-size 8192 --disable-radix-cache --sleep-on-idle \
    --enable-metrics --random-seed 0 "${sgl[@]}" >"$out/sglang.log" 2>&1 &
servers+=($!)
wait_for http://127.0.0.1:30000 $! "$out/sglang.log"
VLLM_SERVER_DEV_MODE=1 setsid "$VLLM/bin/vllm" serve $model --port 8000 --load-format $weights \
    --dtype bfloat16 --max-model-len 4096 --max-num-seqs "$most" --gpu-memory-utilization 0.35 \
    --num-gpu-blocks-override $pages --max-num-batched-tokens 8192 --no-enable-prefix-caching --seed 0 \
    "${vll[@]}" >"$out/vllm.log" 2>&1 &
servers+=($!)
wait_for http://127.0.0.1:8000 $! "$out/vllm.log"

specbatch sweep --model $model --load-format $weights --dtype bfloat16 --max-model-len 4096 --kv-pages $pages \
    --memory-fraction 0.9 --prefill-chunk 8192 --configs "docs/grids/head-to-head-$mode.toml" \
    --concurrency $concurrency "${work[@]}" --repeats 5 --out "$out/sweep" "$@"
