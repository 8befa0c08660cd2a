"""An engine for batch jobs that answers with the last token of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specbatch.core.completion import Completion, RequestMetrics
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.requests.open_requests import StreamEvent
from specbatch.errors import refuse
from specbatch.text.tokenizer import ByteTokenizer


class Echo:
    """It takes prompts of up to 64 tokens with their answers."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer(300)
        self.caps = {"max_model_len": 64, "kv_pages": 64, "page_size": 16, "verify_slots": 1}
        self.prompts = 0

    def check(self, tokens: list[int], params: SamplingParams, index: int = 0) -> None:
        if not tokens or len(tokens) + params.max_new_tokens > 64 or not 0 <= min(tokens) <= max(tokens) < 300:
            raise refuse(f"prompt {index}", len(tokens), "does not fit")

    def stream(
        self, prompts: Iterable[list[int]], params: Iterable[SamplingParams], *, concurrency: int | None, text: bool
    ) -> Iterator[StreamEvent]:
        for index, (tokens, own) in enumerate(zip(prompts, params, strict=False)):
            self.prompts += 1
            for sample in range(own.n):
                answer = [tokens[-1]] * own.max_new_tokens
                metrics = RequestMetrics(prompt_tokens=len(tokens), output_tokens=len(answer))
                done = Completion(index, tokens, answer, self.tokenizer.decode(answer), "length", metrics)
                done.sample = sample
                done.logprobs = [-1.0] * len(answer) if own.logprobs else None
                done.top_logprobs = [{token: -1.0} for token in answer] if own.top_logprobs else None
                yield StreamEvent(index, answer, done, sample=sample)
