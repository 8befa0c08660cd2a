"""grammar_mask and grammar_step: kernels and references agree, and do what the tables say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specbatch.kernels.sampling.grammar_mask import grammar_mask_ref, grammar_step_ref
from specbatch.kernels.sampling.grammar_mask_triton import grammar_mask, grammar_step


def made(batch: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tables of one grammar for each request, where they are, and the state after each token in each state."""
    cells, grammars, after = [torch.full((11,), 99)], [], []
    for request in range(batch):
        states, classes = 3 + request, 2 + 4 * request
        kinds, next = torch.randint(classes, (vocabulary,)), torch.randint(-1, states, (states, classes + request))
        start = sum(map(len, cells))
        grammars.append([start, start + vocabulary, classes + request])  # rows may be longer than there are classes
        cells += [kinds, next.flatten()]
        after.append(next[:, kinds])
    return torch.cat(cells).short().to(device), torch.tensor(grammars, device=device), after


@pytest.mark.parametrize("ids", [None, "of all", "of each"])
@pytest.mark.parametrize(("batch", "nodes", "vocabulary"), [(1, 1, 7), (3, 4, 1024), (5, 2, 2500)])
def test_masks(batch: int, nodes: int, vocabulary: int, ids: str | None, device: torch.device) -> None:
    torch.manual_seed(0)
    tables, grammars, after = made(batch, vocabulary, device)
    states = torch.stack([torch.randint(-1, 3 + request, (nodes,)) for request in range(batch)])
    count, tokens, value = vocabulary, torch.arange(vocabulary).expand(batch, -1), -torch.inf
    given: torch.Tensor | None = None
    if ids is not None:
        count, value = vocabulary // 2, -6e4
        given = torch.randint(vocabulary, (count,) if ids == "of all" else (batch, count))
        tokens = given.expand(batch, -1)
        given = given.to(device)
    given_logits = torch.randn(batch, nodes + 1, count, device=device).half()
    logits, ours, theirs = (one[:, 1:] for one in (given_logits, given_logits.clone(), given_logits.clone()))
    grammar_mask(ours, tables, grammars, states.to(device), value, given)
    grammar_mask_ref(theirs, tables, grammars, states.to(device), value, given)
    assert torch.equal(ours, theirs)
    for request in range(batch):
        for node, state in enumerate(states[request].tolist()):
            is_out = after[request][state, tokens[request]] < 0 if state >= 0 else torch.zeros(count).bool()
            wanted = torch.where(is_out, value, logits[request, node].cpu())
            assert torch.equal(ours[request, node].cpu(), wanted.half())


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (3, 1), (150, 2)])
def test_steps(batch: int, nodes: int, device: torch.device) -> None:
    torch.manual_seed(1)
    tables, grammars, after = made(batch, 9, device)
    states = torch.stack([torch.randint(-1, 3 + request, (nodes,)) for request in range(batch)])
    tokens = torch.randint(9, (batch, nodes + 2))[:, 1 : nodes + 1]  # of a table
    wanted = [
        [after[request][state, token].item() if state >= 0 else -1 for state, token in zip(*pair, strict=True)]
        for request, pair in enumerate(zip(states.tolist(), tokens.tolist(), strict=True))
    ]
    tokens = tokens.to(device)
    assert grammar_step(states.to(device), tokens, tables, grammars).tolist() == wanted
    assert grammar_step_ref(states.to(device), tokens, tables, grammars).tolist() == wanted
