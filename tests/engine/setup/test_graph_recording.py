"""Recording at start: its progress, and graphs that are not recorded because they do not pay or memory is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_ins import FakeRecorder, fake_graphs

from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.runtime.cuda_graphs import Program, batch_buckets, token_buckets

EAGLE = Speculation("eagle3", draft="dummy")
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_new_tokens=6, ignore_eos=True)


def test_progress_of_recording_is_reported(graph_engine: Callable[..., Any]) -> None:
    seen: list[tuple[int, int]] = []
    lines: list[str] = []
    report = lambda *progress: seen.append(progress)  # noqa: E731
    engine = graph_engine(log=lines.append, max_running=3, prefill_chunk=40, report=report)
    total = len(batch_buckets(3)) + len(token_buckets(40))
    layers = engine.model_config.num_layers  # are loaded before
    assert seen[layers:] == [(layers + done, layers + total) for done in range(total + 1)]
    assert any(line.startswith(f"graphs: {total} buckets recorded in ") for line in lines)
    assert engine.caps["capture_s"] > 0
    assert any("graphs" in line and "estimate" in line for line in lines)


def test_long_passes_run_without_graphs_and_are_counted(
    toy: Any, graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:7]]
    expected = graph_engine(speculation=EAGLE).generate(prompts, SAMPLED)
    monkeypatch.setattr("specbatch.engine.setup.builder.recorded_tokens", lambda chunk, *_: min(chunk, 24))
    lines: list[str] = []
    engine = graph_engine(speculation=EAGLE, log=lines.append)
    assert "prefill passes of more than 24 tokens run without graphs, which would not make them faster" in lines
    found = engine.generate(prompts, SAMPLED)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    graphs = engine.record().counters["graphs"]
    for role in ("target_prefill", "draft_prefill"):
        assert graphs[role]["fallbacks"]["long pass"] > 0
        assert (
            graphs[role]["replays"] + graphs[role]["fallbacks"]["long pass"]
            == engine.record().counters["prefill_passes"]
        )
    engine.generate([[3, 4]], SAMPLED)
    assert engine.record().counters["graphs"]["target_prefill"]["replays"] > graphs["target_prefill"]["replays"]


def recorder_without_memory(fails: Callable[[int], bool]) -> type[FakeRecorder]:
    """Recordings run out of memory whose number, in the order in which they are made, is one that fails."""

    class Recorder(FakeRecorder):
        def record(self, program: Program) -> Program:
            replay = super().record(program)
            if fails(self.recorded):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
            return replay

    return Recorder


@pytest.mark.parametrize("failing", [1, 2])
def test_what_memory_does_not_suffice_for_is_not_recorded(
    toy: Any, toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:9]]
    fake_graphs(monkeypatch)
    expected = toy_engine(max_running=8, graphs=Graphs(decode="whole")).generate(prompts, SAMPLED)
    fake_graphs(monkeypatch, recorder_without_memory(lambda number: number == failing))
    lines: list[str] = []
    engine = toy_engine(max_running=8, graphs=Graphs(decode="whole"), log=lines.append)
    assert engine.caps["max_running"] == 4
    assert "max_running: 4 (lowered from 8: there was no memory for the graphs of more)" in lines
    assert any(
        line.startswith("graphs of 8 requests or tokens are not recorded: memory_fraction=0.8") for line in lines
    )
    found = engine.generate(prompts, SAMPLED)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    record = engine.record()
    assert record.caps["max_running"] == 4
    assert max(map(int, record.counters["steps_by_rows"])) == 4
    assert not record.counters["graphs"]["decode"]["fallbacks"]


def test_prefill_passes_that_are_not_recorded_run_without_graphs(
    toy: Any, toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:9]]
    fake_graphs(monkeypatch, recorder_without_memory(lambda number: number == 1))
    engine = toy_engine(graphs=Graphs(prefill="piecewise"), prefill_chunk=48)
    assert engine.caps["max_running"] == 8
    expected = toy_engine(prefill_chunk=48).generate(prompts, SAMPLED)
    assert [item.token_ids for item in engine.generate(prompts, SAMPLED)] == [item.token_ids for item in expected]
    graphs = engine.record().counters["graphs"]["target_prefill"]
    assert graphs["fallbacks"]["long pass"] > 0
    assert graphs["replays"] > 0
