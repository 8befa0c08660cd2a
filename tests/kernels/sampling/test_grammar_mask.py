"""grammar_mask: kernel and reference agree, and mask what the tables say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specbatch.kernels.sampling.grammar_mask import grammar_mask_ref
from specbatch.kernels.sampling.grammar_mask_triton import grammar_mask


@pytest.mark.parametrize(("batch", "nodes", "vocabulary"), [(1, 1, 7), (3, 4, 1024), (5, 2, 2500)])
def test_kernel_is_the_reference(batch: int, nodes: int, vocabulary: int, device: torch.device) -> None:
    torch.manual_seed(0)
    states_of, classes_of, cells, starts = [], [], [torch.full((11,), 99)], []
    for request in range(batch):
        states, classes = 3 + request, 2 + 4 * request
        starts.append(sum(map(len, cells)))
        cells += [torch.randint(classes, (vocabulary,)), torch.randint(-1, 2, (states * classes,))]
        states_of.append(torch.randint(-1, states, (nodes,)))
        classes_of.append(classes)
    tables = torch.cat(cells).short().to(device)
    rest = (
        torch.tensor(starts, device=device),
        torch.tensor(classes_of, device=device),
        torch.stack(states_of).to(device),
    )
    logits = torch.randn(batch, nodes, vocabulary, device=device)
    ours, theirs = logits.clone(), logits.clone()
    grammar_mask(ours, tables, *rest)
    grammar_mask_ref(theirs, tables, *rest)
    assert torch.equal(ours, theirs)
    for request, (start, classes) in enumerate(zip(starts, classes_of, strict=True)):
        kinds = tables[start : start + vocabulary].tolist()
        for node, state in enumerate(states_of[request].tolist()):
            first = start + vocabulary + state * classes
            after = [tables[first + kind].item() if state >= 0 else 0 for kind in kinds]
            masked = (ours[request, node] == -torch.inf).tolist()
            assert masked == [value < 0 for value in after]
