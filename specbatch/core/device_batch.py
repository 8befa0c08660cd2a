"""The static device tensors that every iteration reads and writes, and the only way the host writes to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from specbatch.core.async_copy import upload
from specbatch.core.attention_metadata import positions_from
from specbatch.core.request import Request
from specbatch.kernels import dispatch
from specbatch.kernels.elementwise.gather_rows import gather_rows
from specbatch.kernels.sampling.filtered_distribution import probabilities_ref
from specbatch.kernels.sampling.rng import uniform_ref
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.kernels.sampling.tree_verify import tree_depths

if TYPE_CHECKING:
    from specbatch.kernels.sampling.filtered_distribution_triton import FilteredDistribution


class SamplingFlags(NamedTuple):
    """What the host knows of all rows of one pass; what no row asks for is not computed.

    sampled: some row has a temperature; truncated: some row uses top-k, top-p or min-p; logprobs: some row wants them.
    """

    sampled: bool = False
    truncated: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, requests: Iterable[Request]) -> SamplingFlags:
        params = [request.params for request in requests]
        return cls(
            sampled=any(p.temperature > 0 for p in params),
            truncated=any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params),
            logprobs=any(p.logprobs for p in params),
        )


@dataclass(frozen=True)
class Sampling:
    """Parameters of the rows of one pass, on the device, and what all of them need."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    flags: SamplingFlags

    def law(self, logits: torch.Tensor) -> FilteredDistribution:
        """The distributions tokens are drawn from, on a CUDA device and not written out: logits [B, n, V]."""
        from specbatch.kernels.sampling.filtered_distribution_triton import filter_logits

        parameters = (self.temperature, self.top_k, self.top_p, self.min_p)
        return filter_logits(logits.flatten(0, 1).contiguous(), *parameters, truncated=self.flags.truncated)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distributions tokens are drawn from: logits [B, n, V] -> float32 [B, n, V]."""
        batch, n, vocabulary = logits.shape

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values[:, None].expand(batch, n).flatten()

        cut = (spread(self.top_k), spread(self.top_p), spread(self.min_p)) if self.flags.truncated else ()
        flat = probabilities_ref(logits.flatten(0, 1), spread(self.temperature), *cut)
        return flat.view(batch, n, vocabulary)

    def coins(self, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """Random numbers for tokens at positions [B, n]."""
        return uniform_ref(self.seeds[:, None], positions, stream)

    def choose(self, logits: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """Tokens int64 [B, n] for logits [B, n, V] that stand before `positions` [B, n]: argmax, or a draw."""
        if not self.flags.sampled:
            return logits.argmax(-1)
        if dispatch.runs_kernels(logits):
            from specbatch.kernels.sampling.sample_triton import sample

            return sample(self.law(logits), self.seeds, positions, stream)[0]
        return sample_ref(self.probabilities(logits), self.coins(positions, stream))

    def draw(self, logits: torch.Tensor, positions: torch.Tensor, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [B, n] for logits [B, n, V] before `positions` [B, n], and what they were drawn from."""
        if dispatch.runs_kernels(logits):
            from specbatch.kernels.sampling.filtered_distribution_triton import probabilities
            from specbatch.kernels.sampling.sample_triton import sample

            law = self.law(logits)
            tokens, _ = sample(law, self.seeds, positions, stream)
            return tokens, probabilities(law).view(logits.shape)
        p = self.probabilities(logits)
        return sample_ref(p, self.coins(positions, stream)), p


class DeviceBatch:
    """One row per slot; row 0 is for padding: its pages are page 0 and its length stays 1.

    tokens      [R, W] int64   prompt and output; the newest is the root, whose KV is not written yet
    lengths     [R] int64      KV length = index of the root; the only true length there is
    page_table  [R, P] int64   page of each page_size tokens
    """

    def __init__(self, slots: int, width: int, pages: int, device: torch.device) -> None:
        self.device = device
        self.slots = slots
        self.width = width
        self.tokens = torch.zeros(slots + 1, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.lengths[0] = 1
        self.page_table = torch.zeros(slots + 1, pages, dtype=torch.int64, device=device)
        self._parameters = torch.zeros(slots + 1, 4, dtype=torch.float64, device=device)  # temperature, k, p, min p
        self._seeds = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._same: dict[int, torch.Tensor] = {}

    def admit(self, requests: list[Request], seeds: list[int]) -> None:
        """Write the rows of requests that were given a slot."""
        slots = []
        for request in requests:
            assert request.slot is not None
            slots.append(request.slot)
            count = len(request.tokens)
            line = upload([*request.tokens, *request.pages], self.device)
            self.tokens[request.slot, :count] = line[:count]
            self.page_table[request.slot, : len(request.pages)] = line[count:]
        params = [request.params for request in requests]
        values = np.array([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params], np.float64)
        # In one upload, as each delays the first token: floats travel as their bits.
        table = upload(np.column_stack([slots, np.array(seeds), values.view(np.int64)]), self.device)
        self._seeds[table[:, 0]] = table[:, 1]
        self._parameters[table[:, 0]] = table[:, 2:].view(torch.float64)

    def filled(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """int64 [B]: the same number for each of rows [B]. Made once, for whoever only reads it."""
        if number not in self._same:
            self._same[number] = torch.full((self.slots + 1,), number, dtype=torch.int64, device=self.device)
        return self._same[number][: len(rows)]

    def add_pages(self, cells: list[tuple[int, int, int]]) -> None:
        """Extend page rows: (slot, index, page) each."""
        if cells:
            slot, index, page = upload(cells, self.device).unbind(1)
            self.page_table[slot, index] = page

    def look_up(self, rows: torch.Tensor, flags: SamplingFlags) -> tuple[torch.Tensor, Sampling]:
        """KV lengths [B] of the given rows [B], and their parameters."""
        lengths, seeds = gather_rows(self.lengths, self._seeds, rows)
        return lengths, self._sampling(rows, seeds, flags)

    def sampling(self, rows: torch.Tensor, flags: SamplingFlags) -> Sampling:
        """Parameters of the given rows [B]."""
        return self._sampling(rows, self._seeds[rows], flags)

    def _sampling(self, rows: torch.Tensor, seeds: torch.Tensor, flags: SamplingFlags) -> Sampling:
        # Where none is sampled nothing asks for more than the seeds.
        values = self._parameters[rows] if flags.sampled else self._parameters[:0]
        return Sampling(
            temperature=values[:, 0].float(),
            top_k=values[:, 1].long(),
            top_p=values[:, 2].float(),
            min_p=values[:, 3].float(),
            seeds=seeds,
            flags=flags,
        )

    def stage(
        self, rows: torch.Tensor, lengths: torch.Tensor, drafts: torch.Tensor, ancestors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a verify of drafts [B, N - 1] behind the roots of rows [B] runs: tokens and positions, int64 [B * N].

        ancestors int64 [B, N]: words of a tree; None is a chain."""
        if dispatch.runs_kernels(rows):
            from specbatch.kernels.sampling.accept_triton import verify_inputs

            return verify_inputs(self.tokens, self.lengths, rows, drafts, ancestors)[:2]
        tokens = torch.cat([self.tokens[rows, lengths][:, None], drafts], 1)
        if ancestors is not None:
            return tokens.flatten(), (lengths[:, None] + tree_depths(ancestors)).flatten()
        return tokens.flatten(), positions_from(lengths, tokens.shape[1]).flatten()

    def commit(self, rows: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor) -> None:
        """Write tokens [B, N] behind the roots of rows [B] and add accepted [B] + 1 to their lengths."""
        lengths = self.lengths[rows]
        # All N tokens are written; those beyond the new length are overwritten before anything looks at them.
        self.tokens[rows[:, None], positions_from(lengths + 1, tokens.shape[1])] = tokens
        # Row 0 is for padding and stays as it is.
        self.lengths[rows] = torch.where(rows > 0, lengths + accepted + 1, lengths)
