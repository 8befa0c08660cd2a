"""Models divided over ranks: parts of weights, and features that equal those of the whole model."""

from __future__ import annotations

import pytest
import torch
from targets import TARGETS, Targets
from thread_ranks import ThreadCommunicator, on_ranks

from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.models.partition import part_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_parts_of_all_ranks_are_the_tensor(ranks: int) -> None:
    whole = torch.arange(48 * 5).view(48, 5)
    parts = [part_of(whole, (48 // ranks, 5), rank, ranks) for rank in range(ranks)] if 48 % ranks == 0 else []
    assert torch.equal(torch.cat(parts), whole)


def test_sections_are_divided_separately() -> None:
    q, k, v = torch.arange(4), torch.arange(10, 12), torch.arange(20, 22)
    whole = torch.cat([q, k, v])
    assert part_of(whole, (4,), 1, 2, (2, 1, 1)).tolist() == [2, 3, 11, 21]


def test_fewer_parts_than_ranks_are_replicated() -> None:
    whole = torch.arange(6)
    assert [part_of(whole, (3,), rank, 4).tolist() for rank in range(4)] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2


@pytest.mark.parametrize("name", TARGETS)
def test_divided_model_computes_the_logits_of_the_whole_one(targets: Targets, name: str) -> None:
    checkpoint = targets.checkpoint(name)
    tokens, positions = torch.arange(3, 23) % 37, torch.arange(20)

    def logits(ranks: ThreadCommunicator | None) -> torch.Tensor:
        config = checkpoint.config if ranks is None else checkpoint.config.divided(ranks.size)
        model = Decoder(config, checkpoint.tensor, dtype=torch.float32, device=CPU, max_positions=32, ranks=ranks)
        with torch.inference_mode():
            return model.logits(model.forward(tokens, positions, UncachedContext(model, 1, 20)).last)

    whole = logits(None)
    first, second = on_ranks(2, logits)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, atol=2e-4, rtol=1e-4)
