"""Argmax and top-k children match the torch references."""

from __future__ import annotations

import math

import pytest
import torch
from crossed import crossed
from hard_logits import DIVIDED, hard_logits, part_of_logits

pytest.importorskip("triton")

from specbatch.kernels.sampling import argmax_topk, argmax_topk_triton


def random(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    """Logits with many ties."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return ((noise * 4).round() / 2).to(device)


def some_ids(count: int, device: torch.device) -> torch.Tensor:
    return (torch.randperm(count, generator=torch.Generator().manual_seed(count)) * 3 + 1).to(device)


@pytest.mark.parametrize(("rows", "vocabulary", "mapped"), crossed([(1, 5), (3, 2049), (2, 9001)], [True, False]))
def test_argmax_matches_reference(rows: int, vocabulary: int, mapped: bool, device: torch.device) -> None:
    logits = random(rows, vocabulary, seed=rows, device=device)
    ids = some_ids(vocabulary, device) if mapped else None
    wanted = argmax_topk.argmax_ref(logits, ids)
    assert torch.equal(argmax_topk_triton.argmax(logits, ids), wanted)

    table = torch.full((rows, 3), -7, device=device)
    embedding = torch.randn(3 * vocabulary + 2, 1030, device=device, dtype=torch.float16)
    embedded = argmax_topk_triton.argmax_embedding(logits, embedding, ids, out=table[:, 1])
    assert torch.equal(table[:, 1], wanted)
    assert bool((table[:, ::2] == -7).all())
    assert torch.equal(embedded, embedding[wanted])


def test_argmax_of_strided_rows(device: torch.device) -> None:
    """A view without the first column of each block, and with padding columns."""
    logits = random(3, 5, 4100, seed=7, device=device)[:, 1:, :4099]
    logits[..., 4098] = -9
    logits[1, 2, 4098] = 9
    assert not logits.is_contiguous()
    wanted = logits.argmax(-1)
    assert torch.equal(argmax_topk_triton.argmax(logits), wanted)
    assert wanted[1, 2] == 4098
    flat = random(4, 300, seed=8, device=device)[:, :213]
    assert torch.equal(argmax_topk_triton.argmax(flat), flat.argmax(-1))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_argmax_is_always_a_valid_token(poison: float, device: torch.device) -> None:
    logits = torch.full((2, 2500), poison, device=device)
    assert argmax_topk_triton.argmax(logits).tolist() == [0, 0]
    logits[1] = 0
    logits[1, 2499] = poison
    assert argmax_topk_triton.argmax(logits).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (3, 2049), (2, 9001)])
def test_probabilities_of_the_argmax(rows: int, vocabulary: int, device: torch.device) -> None:
    logits = random(rows, vocabulary, seed=rows, device=device)
    logits[0, vocabulary // 2] += 9
    embedding = torch.randn(vocabulary, 7, device=device)
    wanted, table = logits.double().softmax(-1).amax(-1).float(), torch.full((rows, 3), -7.0, device=device)
    tokens = argmax_topk_triton.argmax(logits, chances=table[:, 1])
    assert torch.equal(tokens, argmax_topk.argmax_ref(logits))
    torch.testing.assert_close(table[:, 1], wanted, rtol=5e-6, atol=0)
    assert bool((table[:, ::2] == -7).all())
    reference = torch.empty_like(wanted)
    embedded = argmax_topk_triton.argmax_embedding(logits, embedding, chances=table[:, 2])
    assert torch.equal(embedded, argmax_topk.argmax_embedding_ref(logits, embedding, chances=reference))
    assert torch.equal(table[:, 2], table[:, 1])
    torch.testing.assert_close(reference, wanted, rtol=2e-5, atol=0)  # whose logarithm is rounded
    block = logits.new_empty(rows, 2)
    argmax_topk_triton.argmax(torch.stack([logits, logits / 2], 1), chances=block)
    torch.testing.assert_close(block[:, 1], (logits / 2).softmax(-1).amax(-1), rtol=5e-6, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_probabilities_of_logits_that_are_not_finite(poison: float, device: torch.device) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[1, 4321], logits[2] = poison, poison
    found, wanted = torch.empty(2, 3, device=device)
    argmax_topk_triton.argmax(logits, chances=found)
    argmax_topk.argmax_ref(logits, chances=wanted)
    assert found.tolist() == pytest.approx([1 / 5000, 1 / 4999 if poison == -math.inf else 0, 0])
    assert wanted.tolist() == pytest.approx(found.tolist())


def check_children(logits: torch.Tensor, topk: int, ids: torch.Tensor | None = None) -> None:
    wanted, tokens = argmax_topk.topk_logprobs_ref(logits, topk, ids)
    scores, found = argmax_topk_triton.topk_logprobs(logits, topk, ids)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(scores, wanted, atol=2e-6, rtol=2e-6)
    assert float(scores.max()) <= 0


@pytest.mark.parametrize(
    ("shape", "topk"), [((1, 4), 4), ((3, 1, 2049), 1), ((2, 3, 300), 5), ((1, 2, 5000), 16), ((1, 70), 63)]
)
def test_topk_children_match_reference(shape: tuple[int, ...], topk: int, device: torch.device) -> None:
    logits = random(*shape, seed=topk, device=device)
    check_children(logits, topk)
    check_children(logits, topk, some_ids(shape[-1], device))


def test_ties_select_the_lower_token_ids(device: torch.device) -> None:
    """The reference matches a stable sort, too."""
    logits = random(4, 2100, seed=3, device=device)
    logits[0, 5], logits[1] = -0.0, 0
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :9]
    assert torch.equal(argmax_topk.topk_logprobs_ref(logits, 9)[1], order)
    assert torch.equal(argmax_topk_triton.topk_logprobs(logits, 9)[1], order)
    assert torch.allclose(argmax_topk_triton.topk_logprobs(logits, 9)[0], logits.log_softmax(-1).gather(1, order))


def test_topk_children_of_strided_rows(device: torch.device) -> None:
    check_children(random(6, 2300, seed=5, device=device)[:, :2222].view(2, 3, -1), 4)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2500])
def test_topk_children_of_non_finite_scores(poison: float, place: int, device: torch.device) -> None:
    logits = random(3, 2600, seed=9, device=device)
    logits[0, place] = poison
    logits[1] = poison
    logits[2] = -math.inf
    logits[2, place] = -1e30  # of blocks without any number nothing is added
    check_children(logits, 4)
    scores, tokens = argmax_topk_triton.topk_logprobs(logits, 4)
    assert tokens.min() >= 0
    assert tokens.max() < 2600
    assert scores[1].tolist() == [-math.inf] * 4
    assert scores[2].tolist() == [0.0] + [-math.inf] * 3


def test_certain_child_keeps_its_parents_score(device: torch.device) -> None:
    logits = torch.full((1, 4096), -60.0, device=device)
    logits[0, 3000] = 33.3
    assert float(argmax_topk_triton.topk_logprobs(logits, 2)[0][0, 0]) == 0.0


@pytest.mark.parametrize(("ranks", "vocabulary", "dtype"), crossed(DIVIDED, [torch.float32, torch.bfloat16]))
def test_keys_of_parts_give_the_argmax(ranks: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = hard_logits(vocabulary).to(device=device, dtype=dtype)
    each = -(-vocabulary // ranks)
    found = []
    for rank in range(ranks):
        first = min(rank * each, vocabulary)
        part = part_of_logits(logits, rank, ranks)
        found.append(argmax_topk_triton.argmax_keys(part, first, min(each, vocabulary - first)))
        reference = argmax_topk.argmax_keys_ref(part, first, min(each, vocabulary - first))
        assert not min(each, vocabulary - first) or torch.equal(found[-1].amax(1, keepdim=True), reference)
    maxima, wanted = argmax_topk.Maxima(torch.cat(found, 1)), logits.cpu().argmax(1)  # CUDA may take any of equals
    assert len({keys.shape for keys in found}) == 1
    assert torch.equal(maxima.best()[1].cpu(), wanted)
    assert torch.equal(argmax_topk_triton.argmax(maxima).cpu(), wanted)
    embedding = torch.randn(vocabulary, 6, device=device)
    assert torch.equal(argmax_topk_triton.argmax_embedding(maxima, embedding).cpu(), embedding.cpu()[wanted])
