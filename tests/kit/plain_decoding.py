"""The plainest definition of what a request must answer: which token follows a text, and when an answer ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.schedule.worker_calls import SAMPLE_SEED_STEP
from specbatch.kernels.sampling.filtered_distribution import probabilities_ref
from specbatch.kernels.sampling.rng import TARGET, uniform_ref

Decode = Callable[[list[int]], str]
CLOSE = 1e-4  # logits, and shares of a random number, that rounding may confuse


def seed_of_sample(seed: int, sample: int) -> int:
    """The seed of a sample, as a signed 64-bit number."""
    return (seed + sample * SAMPLE_SEED_STEP + (1 << 63)) % (1 << 64) - (1 << 63)


def check_end(item: Completion, params: SamplingParams, end_tokens: frozenset[int], decode: Decode) -> None:
    """The answer ends at its first stop token, stop string or at the limit, and its text goes that far."""
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else end_tokens)
    tokens, early = item.token_ids, decode(item.token_ids[: params.min_tokens])
    for count in range(1, len(tokens) + 1):
        reason, kept = None, tokens[:count]
        shown = decode(kept)
        same = next((at for at, (one, other) in enumerate(zip(early, shown, strict=False)) if one != other), len(early))
        stops = [shown.find(stop, max(0, same - len(stop) + 1)) for stop in params.stop]
        cuts = [place for place in stops if place >= 0]
        if kept[-1] in ends:
            assert count > params.min_tokens, "an end token within min_tokens"
            reason, shown = "stop", decode(kept[:-1] if params.skip_special_tokens else kept)
        elif cuts and count > params.min_tokens:
            reason, shown = "stop", shown[: min(cuts)]
        elif count == params.max_new_tokens:
            reason = "length"
        if item.is_complete:
            assert reason == (item.finish_reason if count == len(tokens) else None)
        else:
            assert reason is None
        if count == len(tokens):
            assert item.text == shown


def check_tokens(
    item: Completion, params: SamplingParams, end_tokens: frozenset[int], logits: torch.Tensor, *, engine_seed: int
) -> bool:
    """Whether the tokens are those that the baseline samples with the request's seed. logits float64 [prompt + output,
    V]: of the whole text, computed without a cache."""
    start, count = len(item.prompt_token_ids), len(item.token_ids)
    ends = sorted({*params.stop_token_ids} | (set() if params.ignore_eos else end_tokens))
    logits = logits[start - 1 : start - 1 + count].clone()
    logits[: params.min_tokens, ends] = -torch.inf
    tokens = torch.tensor(item.token_ids, dtype=torch.int64)
    if not params.temperature:
        return bool((logits.gather(1, tokens[:, None])[:, 0] >= logits.amax(-1) - CLOSE).all())
    seed = params.seed if params.seed is not None else (engine_seed << 32) + item.index
    u = uniform_ref(torch.tensor(seed_of_sample(seed, item.sample)), torch.arange(start, start + count), TARGET)

    def follows(top_p: float, min_p: float) -> torch.Tensor:
        """bool [count]: whether each token is the one that its random number chooses."""
        filters = filled(params.top_k, torch.int64), filled(top_p), filled(min_p)
        p = probabilities_ref(logits, filled(params.temperature), *filters).double()
        after = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
        own = p.gather(1, tokens[:, None])[:, 0]
        return (own > 0) & (after - own - CLOSE <= u) & (u <= after + CLOSE)

    def filled(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype)

    # By rounding, a token at a threshold may be kept or not.
    near = [(params.top_p, params.min_p * change) for change in (1, 1 - CLOSE, 1 + CLOSE)]
    near += [(min(params.top_p * change, 1.0), params.min_p) for change in (1 - CLOSE, 1 + CLOSE)]
    return bool(torch.stack([follows(*thresholds) for thresholds in near]).any(0).all())


def check_logprobs(item: Completion, params: SamplingParams, logits: torch.Tensor) -> None:
    """Log-probabilities are those of the model, before temperature, truncation and `min_tokens`."""
    assert (item.logprobs is not None) == params.logprobs
    assert (item.top_logprobs is not None) == (params.top_logprobs > 0)
    start, count = len(item.prompt_token_ids), len(item.token_ids)
    logprobs = logits[start - 1 : start - 1 + count].log_softmax(-1)
    if item.logprobs is not None:
        own = logprobs.gather(1, torch.tensor(item.token_ids, dtype=torch.int64)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(item.logprobs, dtype=torch.float64), own, atol=1e-3, rtol=0)
    if item.top_logprobs is not None:
        assert len(item.top_logprobs) == count
        best = logprobs.topk(params.top_logprobs).values
        found = torch.tensor([list(row.values()) for row in item.top_logprobs], dtype=torch.float64)
        torch.testing.assert_close(found.view(best.shape), best, atol=1e-3, rtol=0)
        for row, values in zip(logprobs, item.top_logprobs, strict=True):
            assert all(abs(row[token].item() - value) < 1e-3 for token, value in values.items())
