"""Inputs of prefill passes: the kernel and its reference against a loop over all tokens."""

from __future__ import annotations

import pytest
import torch

from specbatch.kernels.attention.prefill.prompt_inputs import prompt_inputs_ref
from specbatch.kernels.attention.prefill.prompt_inputs_triton import prompt_inputs
from specbatch.kernels.attention.queries import PromptInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch, StaticRaggedBatch

PAGE, PAGES, SLOTS = 4, 60, 9


@pytest.mark.parametrize("fill", [prompt_inputs_ref, prompt_inputs])
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    ("spans", "padding"),
    [
        ([(3, 0, 1)], 0),
        ([(8, 5, 14), (2, 0, 1), (5, 7, 8)], 3),
        ([(slot, slot, 3 * slot) for slot in range(1, SLOTS)], 0),  # a power of two
        ([(1, 0, 130), (4, 100, 237)], 20),  # several programs
        ([(slot, 0, 1) for slot in range(1, SLOTS)], 150),
    ],
)
def test_inputs_are_those_of_each_token(
    fill: object, is_given: bool, is_static: bool, spans: list[tuple[int, int, int]], padding: int, device: torch.device
) -> None:
    page_table = torch.randperm(SLOTS * PAGES, device=device).view(SLOTS, PAGES) + 1
    tokens = torch.randint(1, 1000, (SLOTS, PAGE * PAGES), device=device)
    slots, starts, ends = (list(part) for part in zip(*spans, strict=True))
    batch = RaggedBatch(starts, ends, slots, page_table, PAGE)
    table, given = batch.table, torch.tensor([int(is_given)], device=device) if is_given else None
    if is_static:
        static = StaticRaggedBatch(batch.offsets[-1] + padding, len(spans) + 3, page_table, PAGE, fresh=batch.fresh)
        static.table.fill_(77)  # of an earlier pass
        static.load(batch, given=is_given)
        table, given = static.table, static.given
    places = [(slot, position) for slot, start, end in spans for position in range(start, end)]
    wanted = [
        [-7 if is_given else tokens[place].item() for place in places],
        [position for _, position in places],
        [slot for slot, _ in places],
        [page_table[slot, position // PAGE].item() * PAGE + position % PAGE for slot, position in places],
    ]
    out = PromptInputs.empty(len(places) + padding, device)
    beyond = PromptInputs(*(torch.full((len(part) + 2,), -7, device=device) for part in out))
    for known in (tokens, None):
        target = beyond.first(len(places) + padding)
        fill(table, page_table, PAGE, known, target, given)  # type: ignore[operator]
        wanted[0] = wanted[0] if known is not None else [0] * len(places)
        assert [part.tolist() for part in target] == [[*part, *[0] * padding] for part in wanted]
        assert all((part[-2:] == -7).all() for part in beyond), "nothing is written past the last row"
