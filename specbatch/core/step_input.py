"""The input of one decode step, and the drafts that a drafter proposes for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbatch.core.attention_metadata import DecodeMetadata
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.sampling import Sampling
from specbatch.kernels.attention.queries import Mask, SharedPrefixes
from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.common.packed_rows import PackedRows
from specbatch.kernels.sampling.accept import Proposal

__all__ = ["Proposal", "StepInput"]


@dataclass(frozen=True)
class StepInput:
    """One decode step over B running requests.

    slots       int64 [B]: the slot of each request in `batch`
    lengths     int64 [B]: KV lengths before the step
    num_drafts  tokens to draft after each root (of a tree: its nodes), at most those that the drafter was built for
    bound       no KV is longer than this after the step
    needs_confidence  whether the proposal shall have one, if the drafter can
    prefixes    that requests share, for attention that reads them once; None: none
    budget      rows per request of the verify, where the host chooses it; else None
    """

    batch: DeviceBatch
    slots: torch.Tensor
    lengths: torch.Tensor
    num_drafts: int
    page_size: int
    bound: int
    sampling: Sampling
    needs_confidence: bool = False
    prefixes: SharedPrefixes | None = None
    budget: float | None = None

    def verified(self, accepted: torch.Tensor) -> VerifiedRows:
        """The requests after a verify that accepted so many drafts [B] of each."""
        return VerifiedRows(self.batch.page_table, self.slots, self.lengths, accepted)

    def decode_metadata(
        self,
        lengths: torch.Tensor,
        num_queries: int,
        ancestors: torch.Tensor | None = None,
        first_node: int = 0,
        masks: tuple[Mask, ...] | None = None,
        packed: PackedRows | None = None,
    ) -> DecodeMetadata:
        """Attention metadata of a pass of `num_queries` tokens per request after KV lengths [B]: a chain, or a tree
        with `ancestors` int64 [B, num_queries], `first_node` of whose nodes are in the cache. masks, packed: see
        `DecodeMetadata`."""
        return DecodeMetadata(
            self.batch.page_table,
            self.slots,
            lengths,
            num_queries,
            self.page_size,
            self.bound,
            ancestors,
            first_node,
            packed,
            self.prefixes,
            masks,
        )
