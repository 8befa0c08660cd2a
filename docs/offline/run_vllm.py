"""The offline points in vLLM 0.33.0: python docs/offline/run_vllm.py --model FOLDER [--draft HEAD] --output FILE"""

from __future__ import annotations

import time

from points import MOST_REQUESTS, MOST_TOKENS, RATES, Prompts, Run, arguments, measure, token_times


def main() -> None:
    args = arguments("points in vLLM")
    import vllm  # takes seconds

    rows = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024]
    speculation = {}
    if args.draft:
        rows = [4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096]
        speculation["speculative_config"] = {
            "method": "eagle3",
            "model": args.draft,
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(RATES),
        }
    llm = vllm.LLM(
        model=args.model,
        skip_tokenizer_init=True,
        load_format=args.load_format,
        dtype="bfloat16",
        max_model_len=MOST_TOKENS,
        max_num_seqs=MOST_REQUESTS,
        max_num_batched_tokens=16_384,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.92,
        compilation_config={"cudagraph_capture_sizes": rows},
        generation_config="vllm",
        disable_log_stats=False,  # times and counters come from them
        seed=1,
        **speculation,
    )

    def counter(name: str) -> float:
        return sum(found.value for found in llm.get_metrics() if found.name == f"vllm:spec_decode_num_{name}")

    def generate(prompts: Prompts, tokens: int) -> Run:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        accepted, drafts = counter("accepted_tokens"), counter("drafts")
        began, began_s = time.monotonic(), time.perf_counter()  # the engine's process has the same monotonic clock
        done = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        accepted, drafts = counter("accepted_tokens") - accepted, counter("drafts") - drafts
        counts = [len(request.outputs[0].token_ids) for request in done]
        first = [request.metrics.first_token_ts - began for request in done]
        last = [request.metrics.last_token_ts - began for request in done]
        return Run(seconds, sum(counts), *token_times(first, last, counts), 1 + accepted / drafts if drafts else None)

    measure("vLLM", vllm.__version__, args, generate, llm.reset_prefix_cache)


if __name__ == "__main__":
    main()
