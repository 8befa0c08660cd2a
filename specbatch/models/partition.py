"""Tensor parallelism: which part of each weight belongs to a rank, and layers whose output is a sum over ranks.

A rank's config has the sizes of its part (`ModelConfig.divided`): its heads, its share of the MLP and of the experts.
Model code runs with that config as if it were the whole model. The part of a tensor follows from its shape: a dimension
that is smaller than in the checkpoint is divided. Where the columns of a weight are divided, each rank computes a part
of every output, and the layer ends with an all-reduce that also adds the residual.

A tensor of a safetensors file is a view of the mapped file, so that a rank reads only the part that it cuts out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.gemm.linear import Linear, Norm
from specbatch.kernels.sampling.argmax_topk import Maxima, Scores, argmax_keys


def part_of(
    tensor: torch.Tensor, shape: Sequence[int], rank: int, ranks: int, sections: Sequence[int] = ()
) -> torch.Tensor:
    """The part of `tensor` that has this shape and belongs to `rank`; a view, or a copy if it has several sections.

    sections: sizes in the part of what the tensor concatenates along the divided dimension, each of which is divided on
    its own; () if it is one. If fewer parts than ranks exist (KV heads), neighbouring ranks have the same one.
    """
    divided = [dim for dim, (whole, size) in enumerate(zip(tensor.shape, shape, strict=True)) if whole != size]
    if not divided:
        return tensor
    [dim] = divided
    sections = sections or (shape[dim],)
    parts = tensor.shape[dim] // shape[dim]
    assert sum(sections) == shape[dim], f"sections {sections} of {shape[dim]}"
    assert tensor.shape[dim] == parts * shape[dim], f"{tuple(tensor.shape)} in parts of {tuple(shape)}"
    assert ranks % parts == 0, f"{parts} parts for {ranks} ranks"
    index, start, found = rank * parts // ranks, 0, []
    for size in sections:
        found.append(tensor.narrow(dim, start + index * size, size))
        start += parts * size
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def rows_per_rank(vocabulary: int, ranks: int) -> int:
    """Rows of an output matrix that a rank holds: as many on each; past the vocabulary they are zero."""
    return -(-vocabulary // ranks)


def vocabulary_part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of an output matrix [vocabulary, hidden] that belong to `rank`; a view if the vocabulary can be
    divided."""
    count = rows_per_rank(len(whole), ranks)
    mine = whole[rank * count : (rank + 1) * count]
    return F.pad(mine, (0, 0, 0, count - len(mine))) if len(mine) < count else mine


def scores(head: Linear, hidden: torch.Tensor, *, greedy: bool, norm: Norm | None = None) -> Scores:
    """Logits [T, V] of hidden [T, H], or if `greedy` what suffices for their argmax: ranks then exchange a few numbers
    per row in place of their logits."""
    return joined_scores(head, own_logits(head, hidden, norm=norm), greedy=greedy)


def own_logits(
    head: Linear, hidden: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of hidden [T, H] for the rows of the output matrix on this rank, plus a residual like them, whose memory
    may be used up."""
    matrix = head.part if isinstance(head, VocabParallelHead) else head
    return matrix(hidden, norm=norm, residual=residual)


def joined_scores(head: Linear, own: torch.Tensor, *, greedy: bool) -> Scores:
    """`scores` from the `own_logits` of all ranks."""
    if not isinstance(head, VocabParallelHead):
        return own
    return head.maxima(own) if greedy else head.whole(own)


class _Divided(Linear):
    """A `Linear` of which each rank computes a part of the output."""

    def __init__(self, part: Linear, ranks: Communicator) -> None:
        self.shape, self.bias = part.shape, part.bias
        self._part, self._ranks = part, ranks

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self._combined(self._part(x, norm=norm), residual)
        return y if out is None else out.copy_(y)

    def after_gate(
        self, gate_up: Linear, x: torch.Tensor, norm: Norm, *, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self._combined(self._part.after_gate(gate_up, x, norm, residual=None), residual)

    def _combined(self, part: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The whole output from the parts of all ranks, plus the residual."""
        raise NotImplementedError


class RowParallelLinear(_Divided):
    """A `Linear` of which this rank has some input columns, and a bias only on rank 0: its output is summed over the
    ranks."""

    def _combined(self, part: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self._ranks.all_reduce(part, residual)


class VocabParallelHead(_Divided):
    """An output matrix of which this rank has some rows; its output is the logits of the whole vocabulary."""

    def __init__(self, part: Linear, vocabulary: int, ranks: Communicator) -> None:
        """part: rows of this rank, as many on each rank; those past the vocabulary are ignored."""
        super().__init__(part, ranks)
        self.shape = torch.Size((vocabulary, part.shape[1]))

    @property
    def part(self) -> Linear:
        """The rows of this rank."""
        return self._part

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] from those of this rank's rows on each rank."""
        return self._combined(own, None)

    def maxima(self, own: torch.Tensor) -> Maxima:
        """The maxima of all ranks' parts of the logits."""
        rank, ranks, (vocabulary, _) = self._ranks.rank, self._ranks.size, self.shape
        rows = rows_per_rank(vocabulary, ranks)
        first = min(rank * rows, vocabulary)
        keys = argmax_keys(own, first, min(rows, vocabulary - first))
        gathered = self._ranks.all_gather(keys.view(torch.float32)).view(torch.int64)  # their bits
        return Maxima(gathered.transpose(0, 1).flatten(1))

    def _combined(self, part: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        assert residual is None
        return self._ranks.all_gather(part).transpose(0, 1).flatten(1)[:, : self.shape[0]]
