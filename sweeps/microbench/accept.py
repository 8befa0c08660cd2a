"""From logits to committed tokens: kernels and the torch operations that they replace.

`greedy` is argmax, comparison and commit; `stage` the gathering before a verify; `ngram` a lookup in sequences of 4,096
and 40,000 tokens; `sample` a sampled token and commit per row, unfiltered or filtered (top-k 20 and top-p 0.95, or
top-p 0.9 alone) from peaked and flat logits; `reject` rejection sampling of drafts. Repeated calls see the same inputs:
in an engine, too, the head's output is still in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.engine.device.acceptance import accept_and_commit_ref
from specbatch.kernels.drafting.ngram import ngram_match_ref
from specbatch.kernels.drafting.ngram_triton import ngram_match
from specbatch.kernels.sampling.accept import BatchRows, Proposal
from specbatch.kernels.sampling.accept_triton import Chosen, argmax_partials, commit, verify_inputs
from specbatch.kernels.sampling.filtered_distribution_triton import filter_logits, probabilities
from specbatch.kernels.sampling.rng import TARGET
from specbatch.kernels.sampling.sample_triton import rejection_sample, sample
from specbatch.sweeps.microbench.runner import Call, Case, Table

VOCABULARY = 151_936
BATCHES, ROWS = (1, 32, 128), (1, 4, 16)
CALLS, REFERENCE_CALLS = 8, 2
SLOTS, WIDTH = 129, 48_000
FILTERS = {"unfiltered": (0, 1.0), "top-k 20, top-p 0.95": (20, 0.95), "top-p 0.9": (0, 0.9)}
LOGIT_SCALES = {"peaked": 4.0, "flat": 0.5}  # some 10 tokens make 90%, or nearly all of them


class Inputs:
    """BF16 logits and device state of B sequences with n rows each; every second draft is right."""

    def __init__(self, batch: int, n: int) -> None:
        device = torch.device("cuda")
        self.batch, self.n = batch, n
        self.noise = torch.randn(batch * n, VOCABULARY, device=device, dtype=torch.bfloat16)
        best = self.noise.argmax(-1).view(batch, n)
        self.drafts = torch.where(torch.rand(batch, n, device=device) < 0.5, best, 7)[:, : n - 1].contiguous()
        self.drafted = torch.full((batch,), n - 1, device=device)
        self.rows = torch.arange(1, batch + 1, device=device)
        self.tokens = torch.randint(0, 20_000, (SLOTS, WIDTH), device=device)
        self.lengths = torch.full((SLOTS,), 1000, device=device)
        self.starts = self.lengths[self.rows]
        self.positions = self.starts[:, None] + torch.arange(1, n + 1, device=device)
        self.seeds = torch.arange(batch, device=device)
        self.proposal = Proposal(self.drafts, self.drafted)
        self.batch_rows = BatchRows(self.tokens, self.lengths, self.rows)

    def greedy(self) -> torch.Tensor:
        return commit(Chosen(argmax_partials(self.noise), None), self.proposal, self.batch_rows, self.seeds)

    def sampling(self, temperature: float, top_k: int, top_p: float) -> Sampling:
        one = torch.ones(self.batch, device="cuda")
        cut = top_k > 0 or top_p < 1
        return Sampling(
            one * temperature, one.long() * top_k, one * top_p, one * 0, self.seeds, SamplingFlags(temperature > 0, cut)
        )

    def reference(self, logits: torch.Tensor, sampling: Sampling, q: torch.Tensor | None = None) -> torch.Tensor:
        """Accept and commit of an iteration, in torch."""
        proposal = self.proposal._replace(probabilities=q)
        logits, nodes = logits.view(self.batch, self.n, -1), self.positions - 1
        return accept_and_commit_ref(logits, proposal, self.batch_rows, nodes, sampling)[0]

    def sample(self, logits: torch.Tensor, s: Sampling) -> torch.Tensor:
        filters = (s.temperature, s.top_k, s.top_p, s.min_p)
        dist = filter_logits(logits, *filters, truncated=s.flags.truncated)
        chosen = Chosen(*sample(dist, self.seeds, self.positions, TARGET))
        return commit(chosen, self.proposal, self.batch_rows, self.seeds)

    def reject(self, logits: torch.Tensor, s: Sampling, q: torch.Tensor) -> torch.Tensor:
        distribution = filter_logits(logits, s.temperature, s.top_k, s.top_p, s.min_p, truncated=s.flags.truncated)
        tokens, accepted, finite = rejection_sample(
            distribution, self.drafts, self.drafted, q, self.seeds, self.positions
        )
        return commit(Chosen(tokens, finite), self.proposal, self.batch_rows, self.seeds, accepted=accepted)

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`stage` in torch."""
        starts = self.lengths[self.rows]
        tokens = torch.cat([self.tokens[self.rows, starts][:, None], self.drafts], 1)
        return tokens.flatten(), (starts[:, None] + torch.arange(self.n, device="cuda")).flatten()


def tables() -> Iterator[Table]:
    yield Table(_cases())


def _cases() -> Iterator[Case]:
    for batch in BATCHES:
        for n in ROWS:
            x = Inputs(batch, n)
            for name, kernel, reference in _operations(x):
                x.lengths.fill_(1000)
                calls = {"specbatch": [kernel] * CALLS, "torch": [reference] * REFERENCE_CALLS if reference else []}
                yield Case({"B": batch, "n": n, "case": name}, {title: of for title, of in calls.items() if of})
            torch.cuda.empty_cache()


def _operations(x: Inputs) -> Iterator[tuple[str, Call, Call | None]]:
    """Name, kernel and reference, which is left out where it is too large."""
    yield "greedy", x.greedy, partial(x.reference, x.noise, x.sampling(0.0, 0, 1.0))
    yield "stage", partial(verify_inputs, x.tokens, x.lengths, x.rows, x.drafts), x.gather
    for length in (4096, 40_000) if x.n == 1 else ():
        last = torch.full_like(x.rows, length - 1)
        reference = partial(ngram_match_ref, x.tokens, x.rows, last, 4, 2, 7, bound=length - 1)
        yield f"ngram, {length} tokens", partial(ngram_match, x.tokens, x.rows, last, 4, 2, 7), reference
    few = x.batch * x.n <= 64  # the references sort, and write several times their input
    for shape, scale in LOGIT_SCALES.items():
        logits = x.noise * scale
        for name, (top_k, top_p) in FILTERS.items():
            s = x.sampling(1.0, top_k, top_p)
            yield (
                f"sample {name}, {shape}",
                partial(x.sample, logits, s),
                partial(x.reference, logits, s) if few else None,
            )
    if x.n > 1:
        s = x.sampling(1.0, 20, 0.95)
        logits = x.noise * LOGIT_SCALES["peaked"]
        near = (logits + torch.randn_like(logits)).view(x.batch, x.n, -1)[:, :-1].flatten(0, 1).contiguous()
        distribution = filter_logits(near, s.temperature, s.top_k, s.top_p, s.min_p, truncated=True)
        q = probabilities(distribution).view(x.batch, x.n - 1, -1)
        yield "reject, peaked", partial(x.reject, logits, s, q), partial(x.reference, logits, s, q) if few else None
