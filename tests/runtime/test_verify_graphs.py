"""Graphs of the target's pass alone, without a GPU: `FakeRecorder` runs a program again, on fixed tensors."""

from __future__ import annotations

import torch
from stand_ins import FakeRecorder

from specbatch.runtime.cuda_graphs import GraphCounters
from specbatch.runtime.verify_graphs import VerifyGraphs


def test_a_batch_is_padded_to_a_power_of_two_and_recorded_once() -> None:
    seen: list[tuple[list[int], list[list[int]]]] = []

    def forward(slots: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append((slots.tolist(), drafts.tolist()))
        rows = torch.cat([slots[:, None], drafts], 1)
        return rows.flatten().float()[:, None], rows.flatten()

    recorder, counters = FakeRecorder(torch.device("cpu")), GraphCounters()
    graphs = VerifyGraphs(forward, recorder, counters, 6)
    for slots in ([3, 1, 2], [5, 4, 6, 7], [2, 9, 8]):
        drafts = torch.tensor(slots)[:, None] * 10 + torch.arange(2)
        last, rows = graphs(torch.tensor(slots), drafts)
        expected = torch.cat([torch.tensor(slots)[:, None], drafts], 1).flatten()
        assert rows.equal(expected)
        assert last.equal(expected[:, None].float())
        assert seen[-1][0] == slots + [0] * (4 - len(slots))
    assert (recorder.recorded, counters.recorded_late, counters.replays, counters.padded) == (1, 1, 3, 2)
    graphs(torch.tensor([1]), torch.zeros(1, 0, dtype=torch.int64))  # without drafts, one request
    assert (recorder.recorded, counters.padded) == (2, 2)
    assert graphs(torch.arange(1, 6), torch.zeros(5, 0, dtype=torch.int64))[1].tolist() == [1, 2, 3, 4, 5]
    assert recorder.recorded == 3
    assert seen[-1][0] == [1, 2, 3, 4, 5, 0]  # of at most 6 requests, though 8 is the power of two
