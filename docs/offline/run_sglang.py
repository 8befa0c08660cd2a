"""The offline points in SGLang 0.5.23: python docs/offline/run_sglang.py --model FOLDER [--draft HEAD] --output FILE

A head with dummy weights has no map from its tokens to the target's (`d2t`) here, and SGLang skips a lookup. In the
published run the head had one, as published heads have.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from points import MOST_REQUESTS, MOST_TOKENS, RATES, Prompts, Run, arguments, measure, token_times


def main() -> None:
    args = arguments("points in SGLang")
    speculation: dict[str, Any] = {}
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # heads are often trained for 2,048 tokens
    if args.draft:
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(1 + RATES[0] + RATES[0] * RATES[1])
        os.environ["SGLANG_SIMULATE_ACC_METHOD"] = "match-expected"
        os.environ["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
        speculation = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": args.draft,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,  # counts the root
        }
    import sglang  # reads the environment

    engine = sglang.Engine(
        model_path=args.model,
        skip_tokenizer_init=True,
        load_format=args.load_format,
        dtype="bfloat16",
        context_length=MOST_TOKENS,
        max_running_requests=MOST_REQUESTS,
        mem_fraction_static=0.90,
        chunked_prefill_size=8192,
        max_prefill_tokens=16_384,
        cuda_graph_bs_decode=[1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024],
        cuda_graph_bs_prefill=[128, 512, 1024, 2048, 4096, 6144, 8192],
        stream_interval=1_000_000,  # a chunk with the first token, and one at the end
        grammar_backend="none",
        skip_server_warmup=True,
        random_seed=1,
        **speculation,
    )

    async def answer(prompt: list[int], tokens: int) -> tuple[float, float, dict[str, Any]]:
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        first, found = 0.0, {}
        async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
            first, found = first or time.perf_counter(), chunk["meta_info"]
        return first, time.perf_counter(), found

    async def answers(prompts: Prompts, tokens: int) -> list[tuple[float, float, dict[str, Any]]]:
        return await asyncio.gather(*(answer(prompt, tokens) for prompt in prompts))

    def generate(prompts: Prompts, tokens: int) -> Run:
        began = time.perf_counter()
        done = engine.loop.run_until_complete(answers(prompts, tokens))
        seconds = time.perf_counter() - began
        counts = [found["completion_tokens"] for *_, found in done]
        verifies = sum(found.get("spec_verify_ct") or 0 for *_, found in done)
        times = token_times([first - began for first, *_ in done], [last - began for _, last, _ in done], counts)
        accepted = (sum(counts) - len(counts)) / verifies if verifies else None
        return Run(seconds, sum(counts), *times, accepted)

    measure("SGLang", sglang.__version__, args, generate, engine.flush_cache)
    engine.shutdown()


if __name__ == "__main__":
    main()
