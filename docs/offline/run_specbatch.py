"""The offline points in specbatch: python docs/offline/run_specbatch.py --model FOLDER [--draft HEAD] --output FILE"""

from __future__ import annotations

import time

from points import MOST_REQUESTS, MOST_TOKENS, RATES, Prompts, Run, arguments, measure

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.config.acceptance_profile import read_profile
from specbatch.version import __version__


def main() -> None:
    args = arguments("points in specbatch")
    speculation = Speculation()
    if args.draft:
        rates = read_profile(",".join(map(str, RATES)))
        speculation = Speculation("eagle3", draft=args.draft, draft_tokens=3, schedule="v2", simulate_accept=rates)
    config = EngineConfig(
        model=args.model,
        load_format=args.load_format,
        max_model_len=MOST_TOKENS,
        max_running=MOST_REQUESTS // args.divide,
        speculation=speculation,
    )
    with Engine(config, log=print) as engine:

        def generate(prompts: Prompts, tokens: int) -> Run:
            engine.reset_record()
            began = time.perf_counter()
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            done = engine.generate(prompts, params, concurrency=len(prompts))
            seconds = time.perf_counter() - began
            found = engine.record(concurrency=len(prompts)).metrics
            count = sum(len(completion.token_ids) for completion in done)
            return Run(seconds, count, found["mean_ttft_s"], found["mean_tpot_s"], found["accept_length"])

        measure("specbatch", __version__, args, generate, engine.forget_prefixes)


if __name__ == "__main__":
    main()
