"""CUDA graphs without a GPU: `FakeRecorder` runs a program again, on fixed tensors as a graph would."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from stand_ins import FakeRecorder, fake_graphs

from specbatch import EmbeddedPrompt, SpecbatchError
from specbatch.config import Graphs, Speculation
from specbatch.core.async_copy import StepTimer
from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.core.request import SamplingParams
from specbatch.engine.prefill import PrefillStep
from specbatch.runtime.cuda_graphs import RING, Program, batch_buckets, token_buckets
from specbatch.runtime.prefill_forward import PiecewiseGraphs, static_bytes

SPECULATIONS = {
    "none": Speculation(),
    "ngram": Speculation("ngram", draft_tokens=3, ngram_min=1),
    "self": Speculation("standalone", draft="self:skip=1"),
    "other": Speculation("standalone", draft="toy-2", draft_tokens=2),
    "eagle": Speculation("eagle", draft="dummy"),
    "eagle3": Speculation("eagle3", draft="dummy"),
    "mtp": Speculation("mtp", draft_tokens=2),
    "eagle3-tree": Speculation("eagle3", draft="dummy", draft_steps=3, draft_topk=2, draft_tokens=5),
    "block": Speculation("dflash", draft="toy-block"),
    "block-34": Speculation("dflash", draft="toy-block-34", draft_tokens=3),
    "ngram-tree": Speculation("ngram", draft_steps=3, draft_topk=2, ngram_min=1),
    "self-tree": Speculation("standalone", draft="self:skip=1", draft_steps=5, draft_topk=3, draft_tokens=7),
}
BOTH = Graphs(decode="whole", prefill="piecewise")


@pytest.fixture
def graph_engine(toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    fake_graphs(monkeypatch)
    return toy_engine


def with_schedule(speculation: Speculation, schedule: str) -> Speculation:
    return Speculation(**{**speculation.__dict__, "schedule": schedule})


@pytest.mark.parametrize("name", ["none", "self-tree", "eagle3", "block"])
def test_every_pass_is_replayed(toy: Any, graph_engine: Callable[..., Any], name: str) -> None:
    engine = graph_engine(speculation=SPECULATIONS[name], graphs=BOTH, max_running=7)
    engine.generate([list(prompt) for prompt in toy.prompts()[::4]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    found = engine.record().counters["graphs"]
    reads = name in ("self-tree", "eagle3")  # a DFLASH draft writes a prompt in three launches
    assert set(found) == {"decode", "target_prefill"} | ({"draft_prefill"} if reads else set())
    assert found["decode"]["replays"] == engine.record().counters["iterations"] > 0
    assert found["target_prefill"]["replays"] == engine.record().counters["prefill_passes"] > 0
    assert all(item["replays"] and not item["fallbacks"] for item in found.values())
    assert found["target_prefill"]["padded"] > 0


@pytest.mark.parametrize("name", ["eagle3", "self"])
def test_passes_with_embeddings_are_fallbacks_with_their_reason(
    toy: Any, graph_engine: Callable[..., Any], name: str
) -> None:
    plain, prompt = list(toy.prompts()[0]), list(toy.prompts()[20])
    rows = toy.checkpoint.tensors["model.embed_tokens.weight"][prompt[2:5]]
    hidden = EmbeddedPrompt([*prompt[:2], 3, 3, 3, *prompt[5:]], {2: rows})
    engine = graph_engine(speculation=SPECULATIONS[name], graphs=BOTH)
    for asked, tokens in ((hidden, prompt), (plain, plain)):
        [done] = engine.generate([asked], SamplingParams(max_new_tokens=9, ignore_eos=True))
        assert tuple(done.token_ids) == toy.greedy(tuple(tokens))[:9]
    found = engine.record().counters["graphs"]
    assert found.pop("decode")["fallbacks"] == {}
    assert all((item["replays"], item["fallbacks"]) == (1, {"embeddings": 1}) for item in found.values())
    assert engine.record().metrics["graph_coverage"] < 1


def test_without_graphs_every_pass_is_a_fallback_with_its_reason(toy: Any, toy_engine: Callable[..., Any]) -> None:
    engine = toy_engine()
    engine.generate([list(toy.prompts()[0])], SamplingParams(max_new_tokens=5, ignore_eos=True))
    found = engine.record().counters["graphs"]
    assert found["decode"] == {"replays": 0, "fallbacks": {"off": 4}, "padded": 0, "recorded_late": 0}
    assert found["target_prefill"]["fallbacks"] == {"off": 1}
    assert engine.record().metrics["graph_coverage"] is None  # none was asked for
    engine.reset_record()
    assert engine.record().counters["graphs"]["decode"]["fallbacks"] == {}


def test_what_was_not_asked_for_does_not_count_as_a_fallback(toy: Any, graph_engine: Callable[..., Any]) -> None:
    engine = graph_engine(graphs=Graphs(decode="whole"))
    engine.generate([list(toy.prompts()[0])], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert engine.record().metrics["graph_coverage"] == 1.0


def test_padding_rows_are_counted_and_change_nothing(toy: Any, graph_engine: Callable[..., Any]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    engine = graph_engine(graphs=BOTH, max_running=8)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:9] for prompt in prompts]
    assert engine.record().counters["graphs"]["decode"]["padded"] == 8  # three rows in a bucket of four, eight times
    assert int(engine._worker.batch.lengths[0]) == 1


def test_sampling_is_recorded_when_it_is_first_asked_for(toy: Any, graph_engine: Callable[..., Any]) -> None:
    prompt = list(toy.prompts()[0])
    params = SamplingParams(temperature=0.8, seed=3, max_new_tokens=12, ignore_eos=True, logprobs=True)
    engine = graph_engine(graphs=BOTH)
    [plain] = graph_engine().generate([prompt], params)
    recorder = engine._worker.graphs._recorder
    before = recorder.recorded
    [replayed] = engine.generate([prompt], params)
    assert replayed.token_ids == plain.token_ids
    assert replayed.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert recorder.recorded == before + 1
    assert engine.record().counters["graphs"]["decode"]["recorded_late"] == 1
    engine.generate([prompt], params)
    assert recorder.recorded == before + 1


def test_rows_that_did_not_change_are_told_to_a_late_recording(toy: Any, graph_engine: Callable[..., Any]) -> None:
    """It was made over padding rows."""
    prompt = list(toy.prompts()[0])
    sampled = SamplingParams(temperature=0.8, seed=3, max_new_tokens=6, ignore_eos=True)
    [plain] = graph_engine().generate([prompt], sampled)
    engine = graph_engine(graphs=BOTH, max_running=1)
    engine.generate([prompt], SamplingParams(max_new_tokens=3, ignore_eos=True))
    [replayed] = engine.generate([prompt], sampled)
    assert replayed.token_ids == plain.token_ids


@pytest.mark.parametrize("first", range(2, 2 + RING))
def test_a_late_recording_leaves_results_on_their_way_alone(
    toy: Any, graph_engine: Callable[..., Any], first: int
) -> None:
    """A sampled request comes while a result is in flight, in each place of the ring; here that is read as late as a
    slow copy would."""
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    params = [
        SamplingParams(max_new_tokens=first, ignore_eos=True),
        SamplingParams(max_new_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, max_new_tokens=6, ignore_eos=True),
    ]
    engine = graph_engine(graphs=BOTH, max_running=2)
    done = engine.generate(prompts, params, concurrency=2)
    assert engine.record().counters["graphs"]["decode"]["recorded_late"] == 1
    assert tuple(done[1].token_ids) == toy.greedy(tuple(prompts[1]))[:20]


class Clock(StepTimer):
    """A lap of one second, half a second behind the one before."""

    def __init__(self) -> None:
        self._previous: Any = None

    @classmethod
    def begin(cls, device: torch.device) -> StepTimer:
        return cls()

    def end(self, previous: StepTimer | None) -> None:
        self._previous = previous

    def seconds(self) -> tuple[float, float | None]:
        return 1.0, 0.5 if self.follows else None


def test_what_the_device_does_between_iterations_is_nobodys_lateness(
    toy: Any, graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a recording nor a prefill counts as an iteration's time, as a gap or as a late launch."""
    monkeypatch.setattr("specbatch.engine.runner.StepTimer", Clock)
    engine = graph_engine(graphs=BOTH, max_running=2)
    params = [SamplingParams(temperature=t, max_new_tokens=n, ignore_eos=True) for t, n in ((0, 5), (0, 25), (0.8, 6))]
    engine.generate([list(prompt) for prompt in toy.prompts()[:3]], params, concurrency=2)
    counters = engine.record().counters
    late = counters["graphs"]["decode"]["recorded_late"]
    assert late > 0
    assert counters["device_steps"] == counters["iterations"] - late
    # Each iteration that follows another was launched before that one was handled.
    assert 0 < counters["overlapped"] == counters["device_gaps"] < counters["device_steps"] - 1


def test_a_gap_that_began_before_the_record_is_not_its_own(
    toy: Any, graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbatch.engine.runner.StepTimer", Clock)
    engine = graph_engine(graphs=BOTH)
    events = engine.stream([list(toy.prompts()[0])], SamplingParams(max_new_tokens=20, ignore_eos=True))
    for _ in range(5):
        next(events)
    engine.reset_record()
    assert len(list(events)) == 15
    counters = engine.record().counters
    assert counters["device_gaps"] == counters["device_steps"] - 1 > 10
    # A step is its own time and the gap before it, where that is known.
    count, gaps = counters["device_steps"], counters["device_gaps"]
    assert counters["steps_by_rows"] == {"1": [count, count * 1.0 + gaps * 0.5]}


def test_a_closed_engine_leaves_its_memory_at_once(
    graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeRecorder, "record", lambda self, program: lambda: None
    )  # as a graph, which keeps no program
    engine = graph_engine(graphs=BOTH)
    gc.collect()
    kept = [weakref.ref(item) for item in (engine._worker.decode_step.cache, engine._worker.batch, engine._model)]
    gc.disable()
    try:
        engine.close()
        assert [item() for item in kept] == [None, None, None]
    finally:
        gc.enable()


def test_prompt_passes_are_warmed_up_with_and_without_a_prefix(
    graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    run = PrefillStep._run

    ended: list[int] = []

    def spied(self: PrefillStep, spans: list[PromptChunk], ending: list[int], *rest: Any) -> Any:
        seen.extend((span.start, span.end) for span in spans)
        ended.append(len(ending))
        return run(self, spans, ending, *rest)

    monkeypatch.setattr(PrefillStep, "_run", spied)
    batch = graph_engine(graphs=BOTH, prefill_chunk=40)._worker.batch
    width = batch.width
    assert int(batch.lengths[0]) == 1
    assert seen == [(0, 16), (0, 32), (0, 40), (1, 17), (width - 17, width - 1), (0, 16)]
    assert ended == [1, 1, 1, 1, 1, 2]  # max_running is 8
    graph_engine(graphs=BOTH, prefill_chunk=40, max_running=16)
    assert ended[-2:] == [2, 16]
    seen.clear()
    width = graph_engine(graphs=BOTH, prefill_chunk=40, max_model_len=20)._worker.batch.width
    assert all(0 <= start < end < width for start, end in seen)


def test_progress_of_recording_is_reported(graph_engine: Callable[..., Any]) -> None:
    seen: list[tuple[int, int]] = []
    lines: list[str] = []
    engine = graph_engine(
        log=lines.append, graphs=BOTH, max_running=3, prefill_chunk=40, report=lambda *at: seen.append(at)
    )
    total = len(batch_buckets(3)) + len(token_buckets(40))
    assert seen == [(done, total) for done in range(total + 1)]
    assert any(line.startswith(f"graphs: {total} buckets recorded in ") for line in lines)
    assert engine.caps["capture_s"] > 0
    assert any("graphs" in line and "estimate" in line for line in lines)


def test_a_poisoned_prompt_is_named(graph_engine: Callable[..., Any]) -> None:
    engine = graph_engine(model="toy-nan", graphs=BOTH)
    with pytest.raises(SpecbatchError, match="logits of prompt 1 are not finite"):
        engine.generate([[3, 4, 5], [3, 36, 5]], SamplingParams(max_new_tokens=4, ignore_eos=True))


@pytest.mark.parametrize("needs_all_hidden", [True, False])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_features_of_pieces_are_those_of_a_whole_pass(
    graph_engine: Callable[..., Any], count: int, needs_all_hidden: bool
) -> None:
    """Last and auxiliary ones; what is padded, or left from a longer pass before, is not among them."""
    worker = graph_engine(graphs=Graphs())._worker
    batch, page_size = worker.batch, worker._page_size
    model, cache = worker.decode_step.model, worker.decode_step.cache
    model = model.with_aux((2, 0)) if needs_all_hidden else model
    pieces = PiecewiseGraphs(
        model, cache, FakeRecorder(torch.device("cpu")), 48, batch.page_table, needs_all_hidden=needs_all_hidden
    )  # type: ignore[arg-type]
    for _ in pieces.capture():
        pass
    batch.page_table[1, :12] = torch.arange(1, 13)
    for tokens_count in (48, count):
        metadata = PrefillMetadata(batch.page_table, [PromptChunk(1, 0, tokens_count)], page_size)
        tokens = torch.arange(3, 3 + tokens_count) % 37
        rows = torch.tensor([tokens_count - 1, 0])
        replayed = pieces(tokens, metadata, None if needs_all_hidden else rows)
        whole = model.forward(tokens, metadata.positions, metadata.bind(cache))
        wanted = whole.last if needs_all_hidden else whole.last[rows]
        torch.testing.assert_close(replayed.last, wanted, rtol=0, atol=1e-5)
        assert (replayed.aux is None) == (whole.aux is None)
        if replayed.aux is not None:
            torch.testing.assert_close(replayed.aux, whole.aux, rtol=0, atol=1e-5)
        if not needs_all_hidden:
            assert pieces(tokens, metadata, rows[:0]).last.shape == (0, model.config.hidden_size)


@pytest.mark.parametrize(("needs_all_hidden", "aux"), [(False, ()), (True, ()), (True, (2, 0))])
def test_what_the_pieces_hold_is_known(
    graph_engine: Callable[..., Any], needs_all_hidden: bool, aux: tuple[int, ...]
) -> None:
    worker = graph_engine()._worker
    model, cache = worker.decode_step.model.with_aux(aux), worker.decode_step.cache
    recorder: Any = FakeRecorder(torch.device("cpu"))
    pieces = PiecewiseGraphs(model, cache, recorder, 48, worker.batch.page_table, needs_all_hidden=needs_all_hidden)
    held = sum(item.nbytes for item in vars(pieces).values() if isinstance(item, torch.Tensor))
    assert static_bytes(model.config, model.dtype, 48, needs_all_hidden=needs_all_hidden, aux=len(aux)) == held


@pytest.mark.parametrize("name", ["none", "self"])
def test_what_the_pieces_hold_is_planned_for(graph_engine: Callable[..., Any], name: str) -> None:
    """By each model that reads prompts."""
    planned = []
    for chunk in (32, 31):  # as many buckets
        engine = graph_engine(graphs=BOTH, prefill_chunk=chunk, speculation=SPECULATIONS[name])
        planned.append(engine.plan.graphs)
    models = 2 if name == "self" else 1
    assert planned[0] - planned[1] == models * static_bytes(
        engine._model.config, torch.float32, 1, needs_all_hidden=False
    )


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 31, 32, 64, 100, 128, 300])
def test_batch_buckets_rise_to_the_largest_batch(most: int) -> None:
    sizes = batch_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most


@pytest.mark.parametrize("most", [1, 15, 16, 40, 128, 2048, 2050, 8192])
def test_token_buckets_waste_little(most: int) -> None:
    sizes = token_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(after - before <= max(before / 4, 32) for before, after in pairwise(sizes))
    assert all(after - before <= before / 8 for before, after in pairwise(sizes) if before >= 1024)


def test_running_out_of_memory_while_recording_is_one_line_with_the_plan(
    graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(self: FakeRecorder, program: Program) -> Program:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    monkeypatch.setattr(FakeRecorder, "record", record)
    with pytest.raises(
        SpecbatchError, match=r"out of memory while building the engine: .* KV .* graphs .*; use a lower"
    ):
        graph_engine(graphs=BOTH)


def test_running_out_of_memory_in_a_pass_is_one_line_with_the_plan(
    toy: Any, toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(self: Any, *, may_retract: bool) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    engine = toy_engine()
    monkeypatch.setattr("specbatch.engine.runner.Runner.decode", decode)
    with pytest.raises(SpecbatchError, match="out of memory while running prompts"):
        engine.generate([list(toy.prompts()[0])], SamplingParams(max_new_tokens=4))
