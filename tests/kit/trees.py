"""Trees of draft tokens as lists of parents: the parent of each node but the root, which is node 0."""

from __future__ import annotations

from random import Random


def random_parents(randomness: Random, nodes: int, is_tree: bool) -> list[int]:
    """Of a tree in which each node's parent is one of the four before it, or of a chain."""
    return [randomness.randrange(max(0, node - 4), node) if is_tree else node - 1 for node in range(1, nodes)]


def path_of(parents: list[int], node: int) -> list[int]:
    """The nodes from the root down to `node`."""
    return [0] if node == 0 else [*path_of(parents, parents[node - 1]), node]


def ancestor_masks(parents: list[int]) -> list[int]:
    """Of each node its ancestors and itself as the bits of a signed 64-bit integer."""
    masks = [sum(1 << step for step in path_of(parents, node)) for node in range(len(parents) + 1)]
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
