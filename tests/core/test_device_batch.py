"""Rows of requests on the device: admission writes each parameter exactly, over those of the last owner of a slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbatch.core.device_batch import Admission, DeviceBatch
from specbatch.core.sampling import SamplingFlags

FLAGS = SamplingFlags(sampled=True, min_tokens=True, penalized=True)
FIRST = Admission(
    2, [5, 6, 7], [3, 4], 0, 0.7, 3, 0.9, 0.1, seed=2**62 + 1, end_tokens=(2, 9), end_from=4, prompt=3,
    penalties=(0.3, -1.3, 1.37),
)  # fmt: skip
SECOND = Admission(1, [8], [5], 0, 1.5, 0, 1.0, 0.0, seed=-(2**63) + 1, prompt=1, penalties=(-2.0, 0.1, 0.01))


def check(batch: DeviceBatch, item: Admission) -> None:
    slots = torch.tensor([item.slot])
    lengths, found = batch.look_up(slots, FLAGS)
    assert lengths.tolist() == [0]
    assert found.seeds.tolist() == [item.seed]
    for values, wanted in (
        (found.temperature, item.temperature), (found.top_p, item.top_p), (found.min_p, item.min_p),
    ):  # fmt: skip
        assert torch.equal(values, torch.tensor([wanted]))
    assert found.top_k.tolist() == [item.top_k]
    assert found.end_tokens is not None
    assert found.end_from is not None
    assert set(found.end_tokens[0].tolist()) == set(item.end_tokens or (0,))
    assert found.end_from.tolist() == [item.end_from]
    assert found.adjustments is not None
    assert found.adjustments.penalties is not None
    assert torch.equal(found.adjustments.penalties, torch.tensor([item.penalties]))
    assert found.adjustments.prompts.tolist() == [item.prompt]
    assert batch.tokens[item.slot, : len(item.tokens)].tolist() == item.tokens
    assert batch.page_table[item.slot].tolist() == [*item.pages, *[0] * (3 - len(item.pages))]


@pytest.mark.parametrize("has_pages", [True, False])
def test_admission_writes_every_parameter_exactly(has_pages: bool) -> None:
    batch = DeviceBatch(2, 8, 3, torch.device("cpu"))
    first, second = (item if has_pages else replace(item, pages=[]) for item in (FIRST, SECOND))
    batch.admit([first, second])
    check(batch, first)
    check(batch, second)
    batch.lengths[1:] = 3
    batch.admit([replace(second, slot=first.slot)])
    check(batch, replace(second, slot=first.slot))
