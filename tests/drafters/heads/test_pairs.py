"""Draft prefill from CUDA graphs writes the same KV as the eager pass, and nothing else."""

from __future__ import annotations

from typing import Any

import draft_heads as heads
import pytest
import torch
from stand_ins import FakeRecorder

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.drafters.head_prefill import HeadPrefill, HeadPrefillGraphs


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "mtp", "mtp of 3"])
def test_graph_prefill_writes_the_same_draft_kv_as_eager(write: Any, bench: Any, algorithm: str) -> None:
    stub, draft, _, _ = heads.usual(algorithm, write)
    here = bench([[1] * 50, [2] * 50, [3] * 50])
    run = heads.Run(here, stub, algorithm.split()[0], 3, draft)
    head = run.drafter.head
    plain, recorded = (here.cache_for(run.target) for _ in range(2))
    pairs, graphs = HeadPrefill(head, plain), HeadPrefillGraphs(head, recorded, FakeRecorder(torch.device("cpu")), 40)  # type: ignore[arg-type]
    assert len(list(graphs.capture())) == len(graphs)
    rows = here.rows.tolist()
    generator = torch.Generator().manual_seed(1)
    # Long chunks, then short ones: stale inputs must not be reused.
    for spans in ([(0, 0, 25), (1, 0, 12)], [(2, 0, 5)], [(2, 5, 6), (0, 25, 28)], [(1, 12, 45)]):
        metadata = PrefillMetadata(
            here.batch.page_table, [PromptChunk(rows[row], start, end) for row, start, end in spans], 4
        )
        count = len(metadata.positions)
        tokens = torch.randint(0, 13, (head.depths, count), generator=generator).unbind()
        taken = torch.randn(count, head.width, generator=generator)
        pairs(tokens, taken, metadata)
        graphs(tokens, taken, metadata)
        for ours, theirs in ((recorded.keys, plain.keys), (recorded.values, plain.values)):
            torch.testing.assert_close(ours[:, 1:], theirs[:, 1:], rtol=1e-5, atol=1e-5)  # no sequence owns page 0
            ours.zero_()  # as if the pages were reassigned
            theirs.zero_()
    assert graphs.counters.replays == 4
    assert graphs.counters.padded == 40 - 37 + 16 - 5 + 16 - 4 + 40 - 33
    assert pairs.counters.fallbacks == {"off": 4}
