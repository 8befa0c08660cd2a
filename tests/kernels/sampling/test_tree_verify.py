"""Tree verification and commit match plain Python; the kernels match their references."""

from __future__ import annotations

import random

import pytest
import torch
from crossed import crossed
from trees import ancestor_masks, path_of

from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.sampling.accept import BatchRows, Proposal
from specbatch.kernels.sampling.accept_triton import Chosen, argmax_partials, verify_inputs
from specbatch.kernels.sampling.rng import acceptance_thresholds, simulated_accept_ref
from specbatch.kernels.sampling.tree_verify import (
    ancestor_words,
    move_accepted_kv_ref,
    simulated_path_ref,
    tree_depths,
    walk_tree_ref,
)
from specbatch.kernels.sampling.tree_verify_triton import commit_tree, move_accepted_kv

SIZES = [1, 2, 3, 7, 8, 17, 33, 64]


def random_tree(randomness: random.Random, count: int) -> list[int]:
    """The parent of each node but the root; some trees are chains, some are flat."""
    kind = randomness.choice(["any", "chain", "flat", "deep"])
    lowest = {
        "any": lambda node: 0,
        "chain": lambda node: node,
        "flat": lambda node: 0,
        "deep": lambda n: max(n - 2, 0),
    }
    return [0 if kind == "flat" else randomness.randint(lowest[kind](node), node) for node in range(count - 1)]


def walk(parents: list[int], drafts: list[int], drafted: int, chosen: list[int]) -> list[int]:
    """The root and the accepted nodes."""
    path = [0]
    while True:
        right = [
            node
            for node in range(1, drafted + 1)
            if parents[node - 1] == path[-1] and drafts[node - 1] == chosen[path[-1]]
        ]
        if not right:
            return path
        path.append(right[0])


class Case:
    """Trees of one size with distinct siblings, and the token chosen after each node: mostly a child's."""

    def __init__(self, seed: int, batch: int, count: int, device: torch.device) -> None:
        randomness = random.Random(seed)
        self.parents = [random_tree(randomness, count) for _ in range(batch)]
        self.drafts, self.chosen, self.drafted = [], [], []
        for parents in self.parents:
            seen: dict[int, int] = {}
            drafts = []
            for parent in parents:
                drafts.append(seen.get(parent, 3))
                seen[parent] = drafts[-1] + randomness.randint(1, 3)
            chosen = [randomness.randint(0, 60) for _ in range(count)]
            for node, parent in enumerate(parents):
                if randomness.random() < 0.7:
                    chosen[parent] = drafts[node]
            self.drafts.append(drafts)
            self.chosen.append(chosen)
            self.drafted.append(randomness.choice([count - 1, randomness.randint(0, count - 1)]))
        own = {"dtype": torch.int64, "device": device}
        self.words = torch.tensor([ancestor_masks(parents) for parents in self.parents], **own)
        self.inputs = (
            torch.tensor(self.chosen, **own).view(batch, count),
            torch.tensor(self.drafts, **own).view(batch, count - 1),
            torch.tensor(self.drafted, **own),
        )

    def walks(self) -> list[list[int]]:
        return [walk(*item) for item in zip(self.parents, self.drafts, self.drafted, self.chosen, strict=True)]


@pytest.mark.parametrize("count", SIZES)
def test_depths_and_ancestor_masks_follow_from_parents(count: int) -> None:
    case = Case(count, 6, count, torch.device("cpu"))
    parents = torch.tensor(case.parents, dtype=torch.int64).view(6, count - 1)
    depths = [[len(path_of(own, node)) - 1 for node in range(count)] for own in case.parents]
    assert tree_depths(case.words).tolist() == depths
    assert torch.equal(ancestor_words(parents, max(map(max, depths))), case.words)


@pytest.mark.parametrize("count", SIZES)
def test_tree_walk_follows_the_chosen_children(count: int) -> None:
    lengths = set()
    for seed in range(20):
        case = Case(seed, 5, count, torch.device("cpu"))
        accepted, path = walk_tree_ref(*case.inputs, case.words)
        for row, wanted in enumerate(case.walks()):
            rest = [node for node in range(count) if node not in wanted]
            assert int(accepted[row]) == len(wanted) - 1
            assert path[row].tolist() == wanted + rest
            lengths.add(len(wanted))
    assert count == 1 or len(lengths) > 1


def test_equal_siblings_yield_one_path() -> None:
    words = torch.tensor([ancestor_masks([0, 0, 0, 2])])  # three children of the root, the second has a child
    for second, count, expected in ((5, 2, [0, 2, 4, 1, 3]), (6, 1, [0, 1, 2, 3, 4])):
        accepted, path = walk_tree_ref(
            torch.tensor([[4, 9, 5, 9, 9]]), torch.tensor([[4, 4, 4, second]]), torch.tensor([4]), words
        )
        assert path.tolist() == [expected]
        assert accepted.tolist() == [count]


@pytest.mark.parametrize(("count", "drawn"), crossed(SIZES, [False, True]))
def test_tree_commit_matches_reference(device: torch.device, count: int, drawn: bool) -> None:
    """Tokens in path order, lengths of all rows except padding, and the result copied to the host."""
    batch, vocabulary = 5, 200
    case = Case(count + drawn, batch, count, device)
    chosen, drafts, drafted = case.inputs
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 9, (8, 100), generator=generator).to(device)
    lengths = torch.randint(1, 30, (8,), generator=generator).to(device)
    rows = torch.tensor([3, 0, 7, 1, 0], device=device)
    before, old = tokens.clone(), lengths.clone()
    accepted, path = walk_tree_ref(chosen, drafts, drafted, case.words)
    finite = torch.rand(batch, count, generator=generator).to(device) < 0.97
    if drawn:
        given, is_finite = chosen, finite
    else:
        logits = torch.randn(batch, count, vocabulary, generator=generator).to(device)
        logits.scatter_(2, chosen[:, :, None], 50.0)
        logits[:, :, 199][~finite] = torch.inf
        chosen = torch.where(finite, chosen, 199)
        accepted, path = walk_tree_ref(chosen, drafts, drafted, case.words)
        given, is_finite = argmax_partials(logits.flatten(0, 1)), None
    proposal = Proposal(drafts, drafted, ancestors=case.words)
    packed, found = commit_tree(Chosen(given, is_finite), proposal, BatchRows(tokens, lengths, rows), rows)
    assert torch.equal(found, path)
    ordered = chosen.gather(1, path)
    assert torch.equal(packed[:, :count], ordered)
    assert torch.equal(packed[:, count:], torch.stack([accepted, drafted, finite.all(1).long()], 1))
    for index, row in enumerate(rows.tolist()):
        if row:
            at = int(old[row]) + 1
            before[row, at : at + count] = ordered[index]
            old[row] += accepted[index] + 1
    assert torch.equal(tokens[1:], before[1:])
    assert torch.equal(lengths, old)


def test_simulated_path_leads_to_the_first_of_the_deepest_nodes_that_count() -> None:
    """Or leaves the nodes in their order, if it is too short; no node is before its place."""
    for seed in range(20):
        case = Case(seed, 5, 12, torch.device("cpu"))
        for accepted in range(12):
            paths = simulated_path_ref(torch.full((5,), accepted), case.inputs[2], case.words)
            for parents, drafted, found in zip(case.parents, case.drafted, paths.tolist(), strict=True):
                deepest = max((path_of(parents, node) for node in range(drafted + 1)), key=len)  # the first one
                wanted = deepest + [node for node in range(12) if node not in deepest]
                assert found == (wanted if accepted < len(deepest) else list(range(12)))
                assert all(node >= place for place, node in enumerate(found[: accepted + 1]))


@pytest.mark.parametrize(("seed", "probability"), list(enumerate([0.0, 0.7, 1.0])))
def test_simulated_acceptance_takes_the_deepest_path(device: torch.device, seed: int, probability: float) -> None:
    case = Case(seed, 6, 8, device)
    thresholds = acceptance_thresholds([probability] * 5, device)
    chosen, drafts, drafted = case.inputs
    tokens, rows = torch.zeros(9, 40, dtype=torch.int64, device=device), torch.arange(1, 7, device=device)
    lengths, seeds = torch.arange(9, device=device), torch.arange(6, device=device) + 7
    finite = torch.ones(6, 8, dtype=torch.bool, device=device)
    wanted = simulated_accept_ref(seeds, lengths[rows], drafted, thresholds)
    order = simulated_path_ref(wanted, drafted, case.words)
    proposal = Proposal(drafts, drafted, ancestors=case.words)
    packed, path = commit_tree(Chosen(chosen, finite), proposal, BatchRows(tokens, lengths, rows), seeds, thresholds)
    assert torch.equal(packed[:, 8], wanted)
    assert torch.equal(packed[:, :8], chosen.gather(1, order))
    assert torch.equal(path, order)


@pytest.mark.parametrize("count", SIZES)
def test_positions_follow_node_depth(device: torch.device, count: int) -> None:
    case = Case(count, 4, count, device)
    tokens = torch.randint(0, 99, (6, 50), device=device)
    lengths = torch.tensor([1, 5, 0, 9, 20, 3], device=device)
    rows = torch.tensor([4, 0, 2, 5], device=device)
    staged, positions = verify_inputs(tokens, lengths, rows, case.inputs[1], case.words)
    roots = tokens[rows, lengths[rows]]
    assert torch.equal(staged.view(4, count), torch.cat([roots[:, None], case.inputs[1]], 1))
    assert torch.equal(positions.view(4, count), lengths[rows][:, None] + tree_depths(case.words))


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_accepted_kv_rows_are_compacted(device: torch.device, page_size: int, dtype: torch.dtype) -> None:
    """Across pages, in all layers, and nothing else is touched."""
    layers, batch, count, kv, dim = 3, 4, 12, 2, 24
    width = -(-60 // page_size)
    generator = torch.Generator().manual_seed(page_size)
    table = torch.zeros(batch + 1, width, dtype=torch.int64)
    table[1:] = (torch.randperm(batch * width, generator=generator) + 1).view(batch, width)
    shape = (layers, batch * width + 1, page_size, kv, dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    rows = torch.tensor([2, 0, 4, 3, 1])
    case = Case(page_size, 5, count, torch.device("cpu"))
    accepted, path = walk_tree_ref(*case.inputs, case.words)
    assert (accepted > 0).any()
    starts = torch.tensor([13, 1, 40, 15, 0])
    wanted = [keys.clone(), values.clone()]
    for index, row in enumerate(rows.tolist()):
        for cache, original in zip(wanted, (keys, values), strict=True):
            for place in range(1, int(accepted[index]) + 1 if row else 0):
                home, source = int(starts[index]) + place, int(starts[index] + path[index, place])
                bits = torch.uint8 if dtype.itemsize == 1 else dtype
                cache.view(bits)[:, table[row, home // page_size], home % page_size] = original.view(bits)[
                    :, table[row, source // page_size], source % page_size
                ]
    packed = torch.cat([path, accepted[:, None]], 1)  # a column, as the iteration has it
    *where, path = (item.to(device) for item in (table, rows, starts, path))
    verified = VerifiedRows(*where, packed.to(device)[:, -1])
    for move in (move_accepted_kv_ref, move_accepted_kv):
        mine = [keys.clone().to(device), values.clone().to(device)]
        move(*mine, verified, path)
        for found, wish in zip(mine, wanted, strict=True):
            assert torch.equal(found[:, 1:].float().cpu(), wish[:, 1:].float())
