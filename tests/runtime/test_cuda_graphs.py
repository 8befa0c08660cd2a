"""CUDA graphs without a GPU: `FakeRecorder` runs a program again, on fixed tensors as a graph does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from crossed import slow_but
from stand_ins import FakeRecorder, fake_graphs, timed_by
from targets import Targets
from watched_calls import Watch

from specbatch import EmbeddedPrompt, SpecbatchError
from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.prefill import PrefillStep
from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.ragged_batch import StaticRaggedBatch
from specbatch.kernels.common.kv_slots import kv_slots
from specbatch.kernels.dispatch import use_deterministic
from specbatch.models.families.padded_attention import PaddedAttention
from specbatch.runtime.cuda_graphs import RING, Program, batch_buckets, nothing, recorded_tokens, token_buckets
from specbatch.runtime.parallel_compilation import Compilation, compile_ahead
from specbatch.runtime.prefill_forward import EagerForward, PiecewiseGraphs, static_bytes

SPECULATIONS = {
    "none": Speculation(),
    "self": Speculation("standalone", draft="self:skip=1"),
    "self-tree": Speculation("standalone", draft="self:skip=1", draft_steps=5, draft_topk=3, draft_tokens=7),
    "eagle3": Speculation("eagle3", draft="dummy"),
    "block": Speculation("dflash", draft="toy-block"),
}
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_new_tokens=6, ignore_eos=True)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("name", ["none", "self-tree", "eagle3", "block"])
def test_every_pass_is_replayed(toy: Any, graph_engine: Callable[..., Any], name: str) -> None:
    engine = graph_engine(speculation=SPECULATIONS[name], max_running=7)
    engine.generate([list(prompt) for prompt in toy.prompts()[::4]], greedy(9))
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
    engine = graph_engine(speculation=SPECULATIONS[name])
    for given, tokens in ((hidden, prompt), (plain, plain)):
        [done] = engine.generate([given], greedy(9))
        assert tuple(done.token_ids) == toy.greedy(tuple(tokens))[:9]
    found = engine.record().counters["graphs"]
    assert found.pop("decode")["fallbacks"] == {}
    assert all((item["replays"], item["fallbacks"]) == (1, {"embeddings": 1}) for item in found.values())
    assert engine.record().metrics["graph_coverage"] < 1


def test_without_graphs_every_pass_is_a_fallback_with_its_reason(toy: Any, toy_engine: Callable[..., Any]) -> None:
    engine = toy_engine()
    engine.generate([list(toy.prompts()[0])], greedy(5))
    found = engine.record().counters["graphs"]
    assert found["decode"] == {"replays": 0, "fallbacks": {"off": 4}, "padded": 0, "recorded_late": 0}
    assert found["target_prefill"]["fallbacks"] == {"off": 1}
    assert engine.record().metrics["graph_coverage"] is None  # graphs are off
    engine.reset_record()
    assert engine.record().counters["graphs"]["decode"]["fallbacks"] == {}


def test_passes_without_a_requested_graph_do_not_count_as_fallbacks(toy: Any, graph_engine: Callable[..., Any]) -> None:
    engine = graph_engine(graphs=Graphs(decode="whole"))
    engine.generate([list(toy.prompts()[0])], greedy(5))
    assert engine.record().metrics["graph_coverage"] == 1.0


def test_padding_rows_are_counted_and_change_no_tokens(toy: Any, graph_engine: Callable[..., Any]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    engine = graph_engine(max_running=8)
    done = engine.generate(prompts, greedy(9))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:9] for prompt in prompts]
    assert engine.record().counters["graphs"]["decode"]["padded"] == 8  # three rows in a bucket of four, eight times
    assert int(engine.parts.worker.batch.lengths[0]) == 1


def test_sampling_graph_is_recorded_by_its_first_request(toy: Any, graph_engine: Callable[..., Any]) -> None:
    """Also if a greedy request ran before it, over rows that have not changed since."""
    prompt = list(toy.prompts()[0])
    params = replace(SAMPLED, logprobs=True)
    [plain] = graph_engine(graphs=Graphs()).generate([prompt], params)
    for first in ([], [greedy(3)]):
        engine = graph_engine(max_running=1)
        for item in first:
            engine.generate([prompt], item)
        recorder = engine.parts.worker.graphs.recorder
        before = recorder.recorded
        [replayed] = engine.generate([prompt], params)
        assert replayed.token_ids == plain.token_ids
        assert replayed.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert recorder.recorded == before + 1
        assert engine.record().counters["graphs"]["decode"]["recorded_late"] == 1
        engine.generate([prompt], params)
        assert recorder.recorded == before + 1


@pytest.mark.parametrize("first", range(2, 2 + RING))
def test_late_recording_does_not_change_results_in_flight(
    toy: Any, graph_engine: Callable[..., Any], first: int
) -> None:
    """A sampled request starts while a result is in flight, at each place of the ring; the result is read as late as
    after a slow copy."""
    prompts = [list(prompt) for prompt in toy.prompts()[:3]]
    engine = graph_engine(max_running=2)
    done = engine.generate(prompts, [greedy(first), greedy(20), replace(SAMPLED, seed=None)], concurrency=2)
    assert engine.record().counters["graphs"]["decode"]["recorded_late"] == 1
    assert tuple(done[1].token_ids) == toy.greedy(tuple(prompts[1]))[:20]


def test_recordings_and_prefills_are_no_part_of_step_times(
    toy: Any, graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither counts as an iteration's time, as a gap or as a late launch."""
    timed_by(monkeypatch)
    engine = graph_engine(max_running=2)
    params = [greedy(5), greedy(25), SAMPLED]
    engine.generate([list(prompt) for prompt in toy.prompts()[:3]], params, concurrency=2)
    counters = engine.record().counters
    late = counters["graphs"]["decode"]["recorded_late"]
    assert late > 0
    assert counters["device_steps"] == counters["iterations"] - late
    # Each iteration that follows another was launched before that one was handled.
    assert 0 < counters["overlapped"] == counters["device_gaps"] < counters["device_steps"] - 1


def test_gap_that_began_before_the_record_is_not_counted(
    toy: Any, graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_by(monkeypatch)
    engine = graph_engine()
    events = engine.stream([list(toy.prompts()[0])], greedy(20))
    for _ in range(5):
        next(events)
    engine.reset_record()
    assert len(list(events)) == 15
    counters = engine.record().counters
    count, gaps = counters["device_steps"], counters["device_gaps"]
    assert gaps == count - 1 > 10
    # A step is its own time and the gap before it, where that is known.
    assert counters["steps_by_rows"] == {"1": [count, count * 1.0 + gaps * 0.5]}


def test_closed_engine_frees_its_memory_at_once(
    graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder(FakeRecorder):  # a graph keeps no program
        def record(self, program: Program) -> Program:
            return nothing

    fake_graphs(monkeypatch, Recorder)
    engine = graph_engine()
    gc.collect()
    kept = [
        weakref.ref(item)
        for item in (engine.parts.worker.decode_step.cache, engine.parts.worker.batch, engine.parts.model)
    ]
    gc.disable()
    try:
        engine.close()
        assert [item() for item in kept] == [None, None, None]
    finally:
        gc.enable()


def test_prefill_is_warmed_up_with_and_without_a_prefix(graph_engine: Callable[..., Any], watch: Watch) -> None:
    seen: list[tuple[int, int]] = []

    def note(step: PrefillStep, spans: list[PromptChunk], ending: list[int], *_: Any) -> int:
        seen.extend((span.start, span.end) for span in spans)
        return len(ending)

    ended = watch(PrefillStep, "_run", before=note)
    batch = graph_engine(prefill_chunk=40).parts.worker.batch
    width = batch.width
    assert int(batch.lengths[0]) == 1
    assert seen == [(0, 16), (0, 32), (0, 40), (1, 17), (width - 17, width - 1), (0, 16)]
    assert ended == [1, 1, 1, 1, 1, 2]  # max_running is 8
    graph_engine(prefill_chunk=40, max_running=16)
    assert ended[-2:] == [2, 16]
    seen.clear()
    width = graph_engine(prefill_chunk=40, max_model_len=20).parts.worker.batch.width
    assert all(0 <= start < end < width for start, end in seen)


@pytest.mark.parametrize("name", slow_but(["self-tree", "eagle3", "block"], SPECULATIONS))
def test_a_rehearsal_changes_nothing(
    toy: Any, graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of all recordings and passes, as with an empty cache of kernels."""
    seen: list[torch.Tensor] = []

    @torch.inference_mode()
    def compile_kernels(worker: DeviceWorker, report: Any) -> None:
        state = worker.batch.tokens, worker.batch.lengths, worker.decode_step.cache.keys
        before = [item.clone() for item in state]
        compile_ahead([item.capture() for item in worker.recordings()], worker.warm_ups(), report)
        assert all(torch.equal(*pair) for pair in zip(before, state, strict=True))
        seen.extend(before)

    monkeypatch.setattr(DeviceWorker, "compile_kernels", compile_kernels)
    monkeypatch.setattr(Compilation, "is_cold", lambda self: True)
    engine = graph_engine(speculation=SPECULATIONS[name], max_running=7)
    assert seen
    prompts = toy.prompts()[::4]
    done = engine.generate([list(prompt) for prompt in prompts], greedy(9))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:9] for prompt in prompts]


def test_layers_that_are_alike_are_warmed_once(graph_engine: Callable[..., Any]) -> None:
    worker = graph_engine(model="toy-deep").parts.worker
    forward = worker.forwards["target"]
    assert len(worker.decode_step.model.layers) == 4
    assert forward.unlike(4) == [0, 2, 3]  # the one before the last layer has another program after it
    assert forward.unlike(1) == [0]


def test_only_a_prompt_with_nan_logits_fails(graph_engine: Callable[..., Any]) -> None:
    engine = graph_engine(model="toy-nan")
    good, bad = engine.generate([[3, 4, 5], [3, 36, 5]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")


@pytest.mark.parametrize("needs_all_hidden", [True, False])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_piecewise_prefill_equals_a_whole_pass(
    graph_engine: Callable[..., Any], count: int, needs_all_hidden: bool
) -> None:
    """Last and auxiliary hidden states, without padding and without those of a longer pass before."""
    worker = graph_engine(graphs=Graphs()).parts.worker
    batch, page_size = worker.batch, worker.prefill_step.page_size
    model, cache = worker.decode_step.model, worker.decode_step.cache
    model = model.with_aux((1, 0)) if needs_all_hidden else model
    piecewise = PiecewiseGraphs(
        model, cache, FakeRecorder(torch.device("cpu")), 48, batch.page_table, batch.tokens,
        needs_all_hidden=needs_all_hidden,
    )  # type: ignore[arg-type]  # fmt: skip
    for _ in piecewise.capture():
        pass
    batch.page_table[1, :12] = torch.arange(1, 13)
    for tokens_count in (48, count):
        metadata = PrefillMetadata(batch.page_table, [PromptChunk(1, 0, tokens_count)], page_size)
        tokens = torch.arange(3, 3 + tokens_count) % 37
        rows = [tokens_count - 1, 0]
        replayed = piecewise(metadata, None if needs_all_hidden else rows, tokens)
        whole = model.forward(tokens, metadata.positions, metadata.bind(cache))
        wanted = whole.last if needs_all_hidden else whole.last[rows]
        torch.testing.assert_close(replayed.last, wanted, rtol=0, atol=1e-5)
        assert (replayed.aux is None) == (whole.aux is None)
        if replayed.aux is not None:
            torch.testing.assert_close(replayed.aux, whole.aux, rtol=0, atol=1e-5)
        if not needs_all_hidden:
            assert piecewise(metadata, rows[:0], tokens).last.shape == (0, model.config.hidden_size)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_layers_with_shared_keys_compute_the_last_tokens_only(
    targets: Targets, watch: Watch, is_recorded: bool
) -> None:
    """Of two chunks, one after a prefix. If more tokens are read than there are chunks, all are computed."""
    worker = targets.engine("gemma4-e2b", "none").parts.worker
    model, cache, batch = worker.decode_step.model, worker.decode_step.cache, worker.batch
    table = batch.page_table
    forward: Any = EagerForward(model, cache)
    if is_recorded:
        recorder: Any = FakeRecorder(torch.device("cpu"))
        forward = PiecewiseGraphs(model, cache, recorder, 16, table, batch.tokens, needs_all_hidden=False)
        list(forward.capture())
    table[1:3] = torch.arange(1, 1 + table[1:3].numel()).view(2, -1)
    tokens = torch.arange(3, 28) % 37
    computed = watch(PaddedAttention, "project", before=lambda mixer, x, *_, **__: len(x))
    for chunks in ([PromptChunk(1, 0, 9)], [PromptChunk(1, 9, 18), PromptChunk(2, 0, 7)]):
        metadata = PrefillMetadata(table, chunks, 4)
        part, tokens = tokens[: len(metadata.positions)], tokens[len(metadata.positions) :]
        whole = model.forward(part, metadata.positions, metadata.bind(cache)).last
        first = 16 if is_recorded else len(part)  # tokens of the layers with keys of their own, with padding
        for rows, last in (
            (metadata.last.tolist(), [len(chunks)]),
            ([8, 0, 3], [len(part)]),
            ([], []),
        ):
            computed.clear()
            found = forward(metadata, rows, part).last
            torch.testing.assert_close(found, whole[rows], rtol=0, atol=1e-5)
            assert computed == [first] * 2 + last * 2


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_last_attention_is_of_the_last_tokens_only(graph_engine: Callable[..., Any], is_recorded: bool) -> None:
    """Of up to four prompts that end in a pass."""
    worker = graph_engine(graphs=Graphs()).parts.worker
    model, cache, table = worker.decode_step.model, worker.decode_step.cache, worker.batch.page_table
    forward: Any = EagerForward(model, cache)
    if is_recorded:
        recorder: Any = FakeRecorder(torch.device("cpu"))
        forward = PiecewiseGraphs(model, cache, recorder, 48, table, worker.batch.tokens, needs_all_hidden=False)
        list(forward.capture())
    attention, passes = cache.attention, list[int]()

    def counted(inputs: PrefillInputs) -> torch.Tensor:
        passes.append(len(inputs.q))
        return attention(inputs)

    cache.attention = counted
    table[1:6, :2] = torch.arange(1, 11).view(5, 2)
    for ends, layers in ((4, len(model.layers) - 1), (0, len(model.layers) - 1), (5, len(model.layers))):
        chunks = [PromptChunk(slot, 0, 8) for slot in range(1, max(ends, 1) + 1)]
        metadata, tokens = PrefillMetadata(table, chunks, 4), torch.arange(8 * len(chunks)) % 37
        rows = metadata.last.tolist()[:ends]
        passes.clear()
        found = forward(metadata, rows, tokens).last
        assert passes == [len(tokens)] * layers
        whole = model.forward(tokens, metadata.positions, metadata.bind(cache)).last
        torch.testing.assert_close(found, whole[rows], rtol=0, atol=1e-5)
    passes.clear()
    with use_deterministic(True):  # the number of prompts must not matter
        forward(metadata, rows[:1], tokens)
    assert len(passes) == len(model.layers)


class FromTables:
    """Attention that reads from the device all that changes from pass to pass, as the Triton kernel does."""

    name = "tables"
    recordable = True

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        q, k_new, v_new, k_cache, v_cache, spans, _, out, *_ = inputs
        assert k_new is not None
        assert v_new is not None
        assert out is not None
        starts, ends, rows, offsets = spans.table.tolist()
        for span, row in spans.tiles(3).tolist():
            first, last = starts[span] + row, min(starts[span] + row + 3, ends[span])
            if first >= last:
                continue
            if spans.fresh:
                k, v = (new[offsets[span] : offsets[span] + last] for new in (k_new, v_new))
            else:
                slots = kv_slots(spans.page_table, torch.full((last,), rows[span]), torch.arange(last), spans.page_size)
                k, v = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
            part = slice(offsets[span] + row, offsets[span] + row + last - first)
            sees = torch.arange(last) <= torch.arange(first, last)[:, None]
            heads = (x.movedim(0, 1) for x in (q[part], k, v))
            out[part] = F.scaled_dot_product_attention(*heads, sees, enable_gqa=True).movedim(0, 1)
        return out


def test_short_passes_with_and_without_prefixes_are_one_graph(
    toy: Any,
    graph_engine: Callable[..., Any],
    watch: Watch,
    use_prefill: Callable[[object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several prompts at once, in chunks, after cached prefixes; and passes of too many prompts, which are recorded in
    segments when they first occur."""
    prompts = [list(prompt) for prompt in toy.prompts()[:24]]
    pairs = [(prompt[:2], prompt[2:]) for prompt in prompts if len(prompt) > 2]
    wanted = graph_engine(graphs=Graphs()).score(pairs)
    use_prefill(FromTables())
    monkeypatch.setattr("specbatch.runtime.prefill_forward.most_spans", lambda bucket: 3)
    loaded = watch(StaticRaggedBatch, "load", before=lambda graph, spans, **_: (graph.fresh, len(spans.counts)))
    engine = graph_engine(max_running=5, prefill_chunk=24, page_size=4)
    for _ in range(2):  # the second time prefixes are cached
        done = engine.generate(prompts, greedy(7))
        assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:7] for prompt in prompts]
    found = engine.record().counters["graphs"]["target_prefill"]
    assert not found["fallbacks"]
    assert 0 < found["recorded_late"] <= len(token_buckets(24))
    assert {*loaded} >= {(fresh, count) for fresh in (True, False) for count in (1, 2)}
    assert len(loaded) < found["replays"] * 2
    for _ in range(2):  # scoring gives a pass its tokens
        before = len(loaded)
        assert [item.logprob for item in engine.score(pairs)] == pytest.approx([item.logprob for item in wanted])
        assert len(loaded) > before
        done = engine.generate(prompts, greedy(2))
        assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:2] for prompt in prompts]


@pytest.mark.parametrize(("needs_all_hidden", "aux"), [(False, ()), (True, ()), (True, (2, 0))])
@pytest.mark.parametrize("name", ["llama", "gemma4-e2b"])
def test_static_bytes_are_those_of_the_buffers(
    targets: Targets, name: str, needs_all_hidden: bool, aux: tuple[int, ...]
) -> None:
    worker = targets.engine(name, "none").parts.worker
    model, cache, batch = worker.decode_step.model.with_aux(aux), worker.decode_step.cache, worker.batch
    recorder: Any = FakeRecorder(torch.device("cpu"))
    piecewise = PiecewiseGraphs(
        model, cache, recorder, 48, batch.page_table, batch.tokens, needs_all_hidden=needs_all_hidden
    )
    tensors = [*vars(piecewise).values(), *piecewise._prompt]
    held = sum(item.nbytes for item in tensors if isinstance(item, torch.Tensor) and item is not batch.tokens)
    assert static_bytes(model.config, model.dtype, 48, needs_all_hidden=needs_all_hidden, aux=len(aux)) == held


@pytest.mark.parametrize("name", ["none", "self"])
def test_memory_plan_has_the_static_bytes_of_each_model(graph_engine: Callable[..., Any], name: str) -> None:
    planned = []
    for chunk in (32, 31):  # equal numbers of buckets
        engine = graph_engine(prefill_chunk=chunk, speculation=SPECULATIONS[name])
        planned.append(engine.plan.graphs)
    models = 2 if name == "self" else 1
    assert planned[0] - planned[1] == models * static_bytes(
        engine.parts.model.config, torch.float32, 1, needs_all_hidden=False
    )


@pytest.mark.parametrize("buckets", [batch_buckets, token_buckets])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 15, 16, 31, 32, 40, 64, 100, 128, 300, 2048, 2050, 8192])
def test_buckets_rise_to_the_maximum(buckets: Callable[[int], list[int]], most: int) -> None:
    sizes = buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    if buckets is token_buckets:  # little padding
        assert all(after - before <= max(before / 4, 32) for before, after in pairwise(sizes))
        assert all(after - before <= before / 8 for before, after in pairwise(sizes) if before >= 1024)


def test_out_of_memory_shows_the_plan(
    toy: Any, graph_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    class Recorder(FakeRecorder):
        record = fail

    engine = graph_engine(graphs=Graphs())
    engine.parts.worker.decode = fail
    with pytest.raises(SpecbatchError, match="out of memory: a decode step of 1 request does not fit beside weights"):
        engine.generate([list(toy.prompts()[0])], greedy(4))
    fake_graphs(monkeypatch, Recorder)
    message = (
        r"out of memory while warming up and recording graphs: .* KV .* graphs .*; use a lower .* or graphs.decode=off"
    )
    with pytest.raises(SpecbatchError, match=message):
        graph_engine()


def test_buckets_stay_few_for_large_batches() -> None:
    assert len(batch_buckets(1024)) == 31
    assert len(batch_buckets(16_384)) == 63
    assert all(after - before <= max(before / 8, 32) for before, after in pairwise(batch_buckets(16_384)))


def test_long_passes_are_recorded_where_the_host_is_slower_than_the_device() -> None:
    sizes = {1024: 8192, 2048: 8192, 2560: 4096, 3584: 2048, 4096: 2048, 8192: 2048}
    assert {hidden: recorded_tokens(16_384, hidden) for hidden in sizes} == sizes
    assert recorded_tokens(16_384, 4096, ranks=2) == 4096
    assert recorded_tokens(48, 4096) == 48


@pytest.mark.parametrize(("name", "kind"), [("none", "decode"), ("self", "prefill"), ("eagle3", "prefill")])
def test_graphs_are_dropped_where_smaller_batches_do_not_help(
    toy: Any, graph_engine: Callable[..., Any], name: str, kind: str
) -> None:
    prompts, lines, speculation = [list(prompt) for prompt in toy.prompts()[:5]], list[str](), SPECULATIONS[name]
    expected = graph_engine(speculation=speculation).generate(prompts, greedy(9))
    engine = graph_engine(speculation=speculation, log=lines.append)
    worker, launch = engine.parts.worker, getattr(engine.parts.worker, kind)

    def failing(*args: Any) -> Any:
        if worker.has_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return launch(*args)

    setattr(worker, kind, failing)
    found = engine.generate(prompts, greedy(9))
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert engine.caps["graphs"] == "off"
    assert any(line.startswith("graphs: off (dropped: a ") for line in lines)
    assert engine.caps["max_running"] == (1 if kind == "decode" else 8)
    assert engine.caps["prefill_chunk"] == 48  # shorter passes are the last resort
    graphs = engine.record().counters["graphs"]
    assert graphs["decode"]["fallbacks"]["off"] > 0
    for role in ("target_prefill", *["draft_prefill"] * (name != "none")):
        assert graphs[role]["fallbacks"]["dropped"] > 0


def test_a_late_recording_that_fails_moves_no_result(
    toy: Any, toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of graphs go to places in turn, which a run before the recording counts, too."""
    failed: list[int] = []

    class Recorder(FakeRecorder):
        def warm(self, program: Program) -> None:
            super().warm(program)
            if self.recorded >= 4 and not failed:
                failed.append(self.recorded)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    prompts, lines = [list(prompt) for prompt in toy.prompts()[:5]], list[str]()
    params = [*[greedy(12)] * 2, *[SAMPLED] * 3]  # after the failure, recordings of before are used first
    expected = toy_engine(max_running=8).generate(prompts, params)
    fake_graphs(monkeypatch, Recorder)
    engine = toy_engine(max_running=8, graphs=Graphs(decode="whole"), log=lines.append)
    found = engine.generate(prompts, params)
    assert failed
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert any(line.startswith("max_running: 2 (lowered from 8: a decode step of 5 requests") for line in lines)
