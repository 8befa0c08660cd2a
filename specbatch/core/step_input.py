"""The input of one decode step, and the drafts that a drafter proposes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specbatch.core.attention_metadata import DecodeMetadata
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.sampling import Sampling
from specbatch.kernels.attention.verify_attention import Mask


@dataclass(frozen=True)
class StepInput:
    """One decode step over B running requests.

    slots       int64 [B]: the slot of each request in `batch`
    lengths     int64 [B]: KV lengths before the step
    num_drafts  tokens to draft after each root (of a tree: its nodes), at most those that the drafter was built for
    bound       no KV is longer than this after the step
    """

    batch: DeviceBatch
    slots: torch.Tensor
    lengths: torch.Tensor
    num_drafts: int
    page_size: int
    bound: int
    sampling: Sampling

    def decode_metadata(
        self,
        lengths: torch.Tensor,
        num_queries: int,
        ancestors: torch.Tensor | None = None,
        first_node: int = 0,
        masks: tuple[Mask, ...] | None = None,
    ) -> DecodeMetadata:
        """Attention metadata of a pass of `num_queries` tokens per request after KV lengths [B]: a chain, or a tree
        with `ancestors` int64 [B, num_queries], `first_node` of whose nodes are in the cache (see `DecodeMetadata`)."""
        return DecodeMetadata(
            self.batch.page_table,
            self.slots,
            lengths,
            num_queries,
            self.page_size,
            self.bound,
            ancestors,
            first_node,
            masks,
        )


class Proposal(NamedTuple):
    """N - 1 drafts after each root, as a chain or a tree.

    tokens         int64 [B, N-1]
    drafted        int64 [B]: how many of them count, the first ones (a sequence without an n-gram match drafts none)
    probabilities  float32 [B, N-1, V]: the distribution each was sampled from; None for deterministic drafts, which
                   those of a tree always are
    ancestors      int64 [B, N], for a tree: node 0 is the root and draft i is node i + 1; bit j of a node's word is set
                   if it sees node j, itself included. Parents come before their children. None for a chain
    """

    tokens: torch.Tensor
    drafted: torch.Tensor
    probabilities: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
