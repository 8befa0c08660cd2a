"""What the worker is given for admitted requests and prefill passes, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from specbatch.core.attention_metadata import PromptChunk
from specbatch.core.device_batch import Admission
from specbatch.core.request import Request
from specbatch.core.sampling_flags import SamplingFlags
from specbatch.engine.device.prefill import PrefillWork
from specbatch.engine.schedule.host_grammars import host_masks
from specbatch.engine.schedule.plans import PrefillPlan, ScheduledChunk
from specbatch.grammar.token_automaton import FREE

# Odd, and no small multiple of the offset between the streams of a seed (`rng.offset_of`), so that no two samples share
# random numbers.
SAMPLE_SEED_STEP = 0xD1B54A32D192ED03


def admission(request: Request, engine_seed: int) -> Admission:
    """A request that was given a slot. engine_seed: of the engine, for requests without one of their own."""
    assert request.slot is not None
    p = request.params
    # The request's own seed, or one from the engine's seed and its index; as a signed 64-bit number. Those of
    # further samples are far from it.
    seed = int(p.seed) if p.seed is not None else (engine_seed << 32) + request.index
    seed += request.sample * SAMPLE_SEED_STEP
    return Admission(
        slot=request.slot,
        tokens=request.tokens,
        pages=request.pages,
        shared=request.shared,
        temperature=float(p.temperature),
        top_k=int(p.top_k),
        top_p=float(p.top_p),
        min_p=float(p.min_p),
        seed=(seed + (1 << 63)) % (1 << 64) - (1 << 63),
        end_tokens=tuple(sorted(request.end_tokens)) if p.min_tokens else (),
        end_from=request.prompt_len + p.min_tokens if p.min_tokens and request.end_tokens else 0,
        prompt=request.prompt_len,
        penalties=p.penalties,
        bias=p.logit_bias,
        banned=request.banned,
        grammar=_grammar(request),
    )


def scored(chunk: ScheduledChunk) -> int:
    """After so many of its tokens, the first ones, the log-probability of the next token is asked for."""
    request = chunk.request
    return max(min(chunk.end, request.prompt_len - 1) - chunk.start, 0) if request.lacks_prompt_logprobs else 0


def prefill_work(plan: PrefillPlan, counts: Sequence[tuple[ScheduledChunk, int]], *, drafts: bool) -> PrefillWork:
    """A prefill pass. counts: what `scored` returns for each chunk; drafts: whether the drafter runs."""
    chunks = plan.chunks
    firsts = accumulate((chunk.end - chunk.start for chunk in chunks), initial=0)  # token of the pass
    targets = [
        (first + place, chunk.request.tokens[chunk.start + place + 1])
        for first, (chunk, count) in zip(firsts, counts, strict=False)
        for place in range(count)
    ]
    ending = [index for index, chunk in enumerate(chunks) if chunk.last]
    return PrefillWork(
        [PromptChunk(chunk.slot, chunk.start, chunk.end, chunk.request.embeddings) for chunk in chunks],
        ending,
        plan.loads,
        plan.saves,
        SamplingFlags.union(chunks[index].request.flags for index in ending),
        targets,
        drafts,
        host_masks([chunks[index] for index in ending]),
    )


def _grammar(request: Request) -> tuple[int, int, int, int]:
    automaton, start = request.automaton, request.table
    if automaton is None:
        return 0, 0, 0, FREE
    return start, start + automaton.classes.size, automaton.row, automaton.after(request.output)
