"""Tree verification: ancestor words, depths, the accepted path, and the move of its keys and values.

A tree of N nodes is int64 [B, N]: bit j of a node's word means that it sees node j, itself included. Node 0 is the
root, and parents come before children, so a node's parent is the highest bit of its word but its own."""

from __future__ import annotations

import torch

from specbatch.kernels.common.kv_slots import VerifiedRows, kv_slots
from specbatch.kernels.dispatch import op


def node_bits(count: int, device: torch.device) -> torch.Tensor:
    """int64 [count]: one bit per node. The 64th is the sign."""
    return torch.ones(count, dtype=torch.int64, device=device) << torch.arange(count, device=device)


def tree_depths(ancestors: torch.Tensor) -> torch.Tensor:
    """How far below the root each node is: words int64 [B, N] -> int64 [B, N]."""
    node = torch.arange(ancestors.shape[1], device=ancestors.device)
    return (ancestors[:, :, None] >> node & 1).sum(-1) - 1


def ancestor_words(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Words int64 [B, C + 1] of the root and C nodes, whose parents are int64 [B, C]; none is below `depth`."""
    bits = node_bits(parents.shape[1] + 1, parents.device)
    words = bits.expand(len(parents), -1)
    parents = torch.nn.functional.pad(parents, (1, 0))  # the root's own
    for _ in range(depth):
        words = words.gather(1, parents) | bits
    return words


def walk_tree_ref(
    chosen: torch.Tensor, drafts: torch.Tensor, drafted: torch.Tensor, ancestors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk from the root to the child that equals the token chosen at its parent, as far as there is one.

    chosen int64 [B, N], at each node; drafts int64 [B, N-1], of which the first drafted [B] count. Returns accepted
    int64 [B] and path int64 [B, N]: the root and the accepted nodes in order, then all others. Among siblings that are
    equal the one that leads further wins, then the first.
    """
    node, bits = torch.arange(ancestors.shape[1], device=chosen.device), node_bits(ancestors.shape[1], chosen.device)
    parents = ((ancestors ^ bits)[:, 1:, None] >> node == 1).int().argmax(-1)
    right = (drafts == chosen.gather(1, parents)) & (node[:-1] < drafted[:, None])
    good = (right * bits[1:]).sum(1, keepdim=True) + 1  # the root is right
    return _deepest(ancestors & ~good == 0, ancestors)


def simulated_path_ref(accepted: torch.Tensor, drafted: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """The path of a simulated acceptance of accepted [B] nodes: int64 [B, N], as `walk_tree_ref` has it.

    It leads to the deepest of the first drafted [B] nodes of the tree, to the first of several. Where that path is
    shorter than `accepted`, nodes stay in their order: a path never has a node before its place (`move_accepted_kv`).
    """
    node = torch.arange(ancestors.shape[1], device=ancestors.device)
    depth, path = _deepest(node <= drafted[:, None], ancestors)
    return torch.where((accepted > depth)[:, None], node, path)


def _deepest(reached: torch.Tensor, ancestors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Depth int64 [B] and path int64 [B, N] of the deepest node that is reached, bool [B, N], or the first of several;
    all other nodes follow in order."""
    count = ancestors.shape[1]
    node, depths = torch.arange(count, device=ancestors.device), tree_depths(ancestors)
    leaf = torch.where(reached, depths * count - node, -count).argmax(1, keepdim=True)
    path = ancestors.gather(1, leaf) >> node & 1
    return depths.gather(1, leaf)[:, 0], path.argsort(dim=1, descending=True, stable=True)


def move_accepted_kv_ref(keys: torch.Tensor, values: torch.Tensor, verified: VerifiedRows, path: torch.Tensor) -> None:
    """Move keys and values of accepted nodes to their places after the root.

    keys, values [layers, pages, page_size, kv_heads, dim], whose dims may differ; path int64 [B, N]. Node path[d] goes
    from lengths + path[d] to lengths + d, for d = 1..accepted.
    """
    page_table, slots, lengths, accepted = verified
    size = keys.shape[2]
    node = torch.arange(path.shape[1], device=path.device)
    source = torch.where(node <= accepted[:, None], path, node)
    homes, places = (
        kv_slots(page_table, slots[:, None], at, size) for at in (lengths[:, None] + node, lengths[:, None] + source)
    )
    bits = torch.uint8 if keys.itemsize == 1 else keys.dtype  # torch copies no rows of FP8
    for cache in (keys.view(bits), values.view(bits)):
        flat = cache.flatten(1, 2)
        flat.index_copy_(1, homes.flatten(), flat.index_select(1, places.flatten()))


move_accepted_kv = op(move_accepted_kv_ref, "specbatch.kernels.sampling.tree_verify_triton:move_accepted_kv")
