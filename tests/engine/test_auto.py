"""`draft_tokens="auto"` in whole engines: the draft model catches up after steps without drafts, and the chosen length
follows from step times, which a fake clock gives here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crossed import crossed, first_quick
from stand_ins import fake_graphs, no_step_times, planned_draft_lengths, random_draft_lengths, timed_by
from watched_calls import Watch

from specbatch import Engine, SamplingParams
from specbatch.config.acceptance_profile import AcceptanceProfile
from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.async_copy import StepTimer
from specbatch.core.sampling import SamplingFlags
from specbatch.drafters.dflash import DFlashDrafter
from specbatch.drafters.draft_model import DraftModelChain
from specbatch.drafters.feature_head import FeatureChain
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.schedule.draft_length import Choice, DraftLength
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.runtime.cuda_graphs import Form, graph_bytes

BOTH = Graphs(decode="whole", prefill="piecewise")
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"algorithm": "ngram", "draft_steps": 6, "ngram_min": 1},
    "same": {"algorithm": "standalone", "draft": "toy", "draft_steps": 5},
    "eagle": {"algorithm": "eagle", "draft": "dummy"},
    "eagle3": {"algorithm": "eagle3", "draft": "dummy", "draft_steps": 5},
    "mtp": {"algorithm": "mtp"},
    "block": {"algorithm": "dflash", "draft": "toy-block-34"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "crowded": {"kv_pages": 36, "max_model_len": 90, "prefill_chunk": 7},
    "graphs": {"graphs": BOTH, "prefill_chunk": 40},
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs(monkeypatch)


def auto(name: str, schedule: str = "v2", **changes: Any) -> Speculation:
    return Speculation(schedule=schedule, draft_tokens="auto", **DRAFTERS[name] | changes)


@pytest.mark.parametrize(("setting", "schedule"), list(zip(SETTINGS, ["v1", "v2", "v2"], strict=True)))
def test_a_draft_model_catches_up_after_steps_without_drafts(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, setting: str, schedule: str
) -> None:
    """A draft with the target's own weights is wrong only where its KV cache lacks tokens: it never is."""
    random_draft_lengths(monkeypatch)
    prompts = [list(prompt) for prompt in toy.prompts()[8:16]]
    engine = toy_engine(speculation=auto("same", schedule), **SETTINGS[setting])
    engine.generate(prompts, SamplingParams(max_new_tokens=25, ignore_eos=True))
    record = engine.record()
    assert bool(record.metrics["retractions"]) == (setting == "crowded")
    counts = record.counters["acceptance"]
    assert counts["tried"] == counts["accepted"]
    assert counts["drafted"] == sorted(counts["drafted"], reverse=True)
    assert 0 < record.metrics["drafted_tokens"] < 5 * record.metrics["verify_steps"]


def test_an_idle_draft_model_catches_up_in_passes_of_at_most_a_chunk(
    toy: Any, toy_engine: Callable[..., Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps without drafts, one with, four without, then with."""
    catch_up = DraftModelChain.catch_up

    def computed(chain: DraftModelChain, batch: Any, shape: Any) -> int:
        return sum(end - start for start, end in zip(shape.spans.starts, shape.spans.ends, strict=True))

    planned_draft_lengths(monkeypatch, [0] * 10 + [5] + [0] * 4, after=5)
    engine = toy_engine(speculation=auto("same", "v1"), prefill_chunk=25, prefix_cache=False)
    totals = watch(DraftModelChain, "catch_up", before=computed)
    monkeypatch.setattr(DraftModelChain, "prefill", lambda self, *args: catch_up(self, *args[:2]))
    engine.generate([list(prompt) for prompt in toy.prompts()[:4]], SamplingParams(max_new_tokens=40, ignore_eos=True))
    # The draft's own pass computes the newest of the ten: ten each, with the token before the root; then four each.
    assert totals == [25, 15, 16]
    assert engine.record().counters["acceptance"]["tried"][4] > 0


@pytest.mark.parametrize("name", ["same", "eagle3"])
def test_the_draft_catches_up_with_a_prefix_that_it_has_not_computed(
    toy: Any, toy_engine: Callable[..., Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An answer without drafts leaves a prefix; the next request shares it, drafts, and leaves it complete."""
    prompt, plan = list(toy.prompts()[-1]), [0] * 39
    planned_draft_lengths(monkeypatch, plan, after=3)
    monkeypatch.setattr(DraftLength, "drafts_prompts", lambda *_: False)
    engine = toy_engine(speculation=auto(name, draft_steps=3))
    found: list[tuple[int, int]] = watch(
        DeviceWorker, "catch_up", before=lambda _, chunks, most: [(chunk.start, chunk.end) for chunk in chunks]
    )
    [done] = engine.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert not found
    longer = prompt + done.token_ids
    for again in range(2):
        plan[:] = [0, 0]
        [other] = engine.generate([[*longer, again]], SamplingParams(max_new_tokens=12, ignore_eos=True))
        cached = other.metrics.cached_tokens
        assert cached > len(prompt)
        [[(start, _)]] = found
        assert start == (cached if again else 0)
        found.clear()


@pytest.mark.parametrize(
    ("name", "schedule"),
    first_quick(2, [("eagle3", "v2"), ("block", "v1"), ("eagle", "v1"), ("mtp", "v2")]),
)
def test_drafts_after_catching_up_are_those_of_a_drafter_that_never_idles(
    toy: Any, toy_engine: Callable[..., Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str
) -> None:
    """Also where only some requests draft, and where it did not run for their prompts."""
    drafted: dict[tuple[int, int], list[int]] = {}
    prompts = [list(prompt) for prompt in toy.prompts()[8:14]]
    params = SamplingParams(max_new_tokens=25, ignore_eos=True)
    kind = DFlashDrafter if name == "block" else FeatureChain

    def note(proposal: Any, _: Any, step: Any) -> None:
        for slot, length, tokens in zip(
            *(t.tolist() for t in (step.slots, step.lengths, proposal.tokens)), strict=True
        ):
            if tokens:
                drafted.setdefault((slot, length), tokens)

    watch(kind, "propose", after=note)
    fixed = Speculation(**DRAFTERS[name] | {"draft_steps": None, "draft_tokens": None if name == "mtp" else 4})
    toy_engine(speculation=fixed).generate(prompts, params)
    expected, drafted = drafted, {}
    random_draft_lengths(monkeypatch)
    engine = toy_engine(speculation=auto(name, schedule, **{} if name == "mtp" else {"draft_steps": 4}))
    engine.generate(prompts, params)
    common = [key for key in drafted if key in expected and key[0]]
    assert len(common) > 10
    lags = sum(engine.record().counters["draft_lengths"]["8"].get(key, 0) for key in ("0", "4 for 3"))
    assert lags > 0
    assert [drafted[key] for key in common] == [expected[key][: len(drafted[key])] for key in common]


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_a_step_for_its_time_alone_needs_no_catching_up(
    toy: Any, toy_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """What is drafted in it may be wrong; later drafts of this draft model are right again."""
    no_step_times(monkeypatch)
    choices = [*[Choice(0)] * 6, Choice(5, timing=True), Choice(0), Choice(3), Choice(0)]
    monkeypatch.setattr(DraftLength, "choose", lambda *_: choices.pop(0) if choices else Choice(5))
    engine = toy_engine(speculation=auto("same", schedule), prefix_cache=False)
    prompts = [list(prompt) for prompt in toy.prompts()[8:14]]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:40] for prompt in prompts]
    counts = engine.record().counters["acceptance"]
    rejected = [tried - right for tried, right in zip(counts["tried"], counts["accepted"], strict=True)]
    assert 0 < sum(rejected) <= len(prompts)


def test_the_draft_model_recomputes_a_retracted_request(
    toy: Any, toy_engine: Callable[..., Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_draft_lengths(monkeypatch, [])
    valid = watch(
        Scheduler,
        "_retract",
        before=lambda scheduler, request: request.draft_kv_valid_until,
        after=lambda _, scheduler, request: request.draft_kv_valid_until,
    )
    engine = toy_engine(speculation=auto("same"), **SETTINGS["crowded"])
    prompts = [list(prompt) for prompt in toy.prompts()[8:16]]
    engine.generate(prompts, SamplingParams(max_new_tokens=25, ignore_eos=True))
    assert any(before is not None for before in valid[::2])
    assert all(after is None for after in valid[1::2])


# -- the chosen length ------------------------------------------------------------------------------------------------


class FakeClock(StepTimer):
    """A step takes `cost` seconds."""

    now = 0.0
    cost: Callable[[int, int], float] = staticmethod(lambda rows, drafts: 1.0 + 0.1 * drafts)

    def __init__(self, is_prefill: bool) -> None:
        self.is_prefill = is_prefill
        self._previous: Any = None
        self._start = self.now

    @classmethod
    def begin(cls, device: torch.device, *, is_prefill: bool = False) -> StepTimer:
        return cls(is_prefill)

    def end(self, previous: StepTimer | None) -> None:
        self._previous = previous
        self._took = self.now - self._start

    def seconds(self) -> tuple[float, float | None]:
        return self._took, None if self._previous is None else 0.0


@pytest.fixture
def clock(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> type[FakeClock]:
    class Clock(FakeClock):
        pass

    def tick(decode_step: DecodeStep, step: Any) -> None:
        Clock.now += Clock.cost(len(step.slots), step.num_drafts)

    def seconds_of(work: Callable[[], object], device: torch.device) -> float:
        start = Clock.now
        work()
        return Clock.now - start

    watch(DecodeStep, "__call__", before=tick)
    timed_by(monkeypatch, Clock)
    monkeypatch.setattr("specbatch.engine.setup.step_times.seconds_of", seconds_of)
    return Clock


def shares(engine: Engine) -> dict[str, float]:
    """Share of the steps by number of drafts, all batches together."""
    rows = engine.record().counters["draft_lengths"].values()
    total = sum(count for row in rows for count in row.values())
    found: dict[str, float] = {}
    for row in rows:
        for drafts, count in row.items():
            found[drafts] = found.get(drafts, 0.0) + count / total
    return found


@pytest.mark.parametrize(
    ("first", "others", "wanted", "name", "graphs", "schedule"),
    crossed([(1.0, 1.0, "5"), (0.0, 0.0, "0"), (0.95, 0.0, "1")], [("same", Graphs()), ("eagle3", BOTH)], ["v1", "v2"]),
)
@pytest.mark.usefixtures("clock")
def test_no_drafts_where_none_is_accepted_and_the_most_where_all_are(
    toy: Any,
    toy_engine: Callable[..., Engine],
    name: str,
    first: float,
    others: float,
    wanted: str,
    schedule: str,
    graphs: Graphs,
) -> None:
    """By simulated acceptance; a first draft that is nearly always accepted is no reason for a second one."""
    profile = AcceptanceProfile("", (first, *[others] * 4))
    speculation = replace(auto(name, schedule), simulate_accept=profile)
    engine = toy_engine(speculation=speculation, graphs=graphs, max_model_len=300, max_running=2)
    prompts = [list(prompt) for prompt in toy.prompts()[:2]]
    engine.generate(prompts, SamplingParams(max_new_tokens=160, ignore_eos=True))  # it learns
    engine.reset_record()
    engine.generate(prompts, SamplingParams(max_new_tokens=160, ignore_eos=True))
    assert shares(engine)[wanted] > 0.9


def test_shortening_the_draft_is_not_part_of_the_step_time(
    toy: Any, toy_engine: Callable[..., Engine], clock: type[FakeClock], watch: Watch
) -> None:
    """A probe without drafts begins with it each time, and would never find out that drafting nothing is best."""

    def slow(chain: FeatureChain, step: Any) -> None:
        clock.now += 7.0

    watch(FeatureChain, "shorten", before=slow)
    found = watch(DraftLength, "took", before=lambda _, choice, seconds: (choice.num_drafts, round(seconds, 6)))
    speculation = replace(auto("eagle3"), simulate_accept_length=2.0)
    engine = toy_engine(speculation=speculation, max_model_len=300, max_running=2)
    engine.generate([list(prompt) for prompt in toy.prompts()[:2]], SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert engine.caps["draft_length_s"]["2"]["0"] == pytest.approx(1.0)
    assert len(set(found)) > 2
    assert set(found) == {(length, round(1.0 + 0.1 * length, 6)) for length, _ in found}


def test_each_batch_size_has_its_own_length(
    toy: Any, toy_engine: Callable[..., Engine], clock: type[FakeClock]
) -> None:
    """On a device where verifying costs nothing in small batches, and as much as decoding in large ones."""
    clock.cost = staticmethod(lambda rows, drafts: 1.0 + drafts * (0.02 if rows < 8 else 1.0))
    speculation = replace(auto("same"), simulate_accept=AcceptanceProfile("", (1.0, 1.0, 0.5, 0.0, 0.0)))
    engine = toy_engine(speculation=speculation, max_model_len=300)
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in [40] * 6 + [260] * 2]
    engine.generate([list(prompt) for prompt in toy.prompts()[:8]], params)
    steps = engine.record().counters["draft_lengths"]
    assert steps["8"]["0"] > 0.8 * sum(steps["8"].values())
    # The fourth is never accepted, and five cost little more.
    assert steps["2"]["4"] > 0.8 * sum(steps["2"].values())
    times = engine.caps["draft_length_s"]
    assert list(times) == ["1", "2", "4", "8"]
    assert times["8"] == pytest.approx({"0": 1.0, "1": 2.0, "2": 3.0, "4": 5.0, "5": 6.0})


def test_times_at_start_rise_with_batch_and_drafts(toy_engine: Callable[..., Engine], clock: type[FakeClock]) -> None:
    """Also on a machine that is busy while two requests, or one draft, are timed."""
    clock.cost = staticmethod(lambda rows, drafts: 9.0 if rows == 2 or drafts == 1 else rows + drafts)
    times = toy_engine(speculation=auto("same"), max_model_len=300).caps["draft_length_s"]
    assert times["8"] == pytest.approx({"0": 8.0, "1": 9.0, "2": 10.0, "4": 12.0, "5": 13.0})
    assert times["2"] == pytest.approx({"0": 4.0, "1": 6.0, "2": 6.0, "4": 8.0, "5": 9.0})
    assert times["1"] == pytest.approx({"0": 1.0, "1": 3.0, "2": 3.0, "4": 5.0, "5": 6.0})


def test_a_step_learns_from_the_requests_that_draft(
    toy: Any, toy_engine: Callable[..., Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which it knows the context, and of all how many tokens were kept, which are those of an answer."""
    learned = watch(
        DraftLength, "learn", before=lambda _, choice, found, *tokens: (choice.num_drafts, list(found), *tokens[:3])
    )
    no_step_times(monkeypatch)
    choices = [Choice(5, [2, 5]), *[Choice(0)] * 12]
    monkeypatch.setattr(DraftLength, "choose", lambda *_: choices.pop(0) if choices else Choice(5))
    engine = toy_engine(speculation=auto("same", "v1"), prefix_cache=False)
    prompts = [list(toy.prompts()[8])] * 8
    engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    length = len(prompts[0])
    assert learned[0] == (5, [(length, 5), (length, 5)], 8 + 10, 8 + 10, 0)
    assert learned[1:3] == [(0, [], 8, 8, 0)] * 2
    *_, emitted, kept, ended = learned[-1]
    assert emitted > kept > 0
    assert ended > 0


# -- settings and log -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({"algorithm": "eagle3", "draft": "x"}, (0, 1, 2, 3)),
        ({"algorithm": "ngram"}, (0, 1, 2, 4)),
        ({"algorithm": "ngram", "draft_steps": 7}, (0, 1, 2, 4, 7)),
        ({"algorithm": "dflash", "draft": "x"}, (0, 1, 2, 4, 8, 15)),
        ({"algorithm": "none"}, (0,)),
    ],
)
def test_the_most_is_the_default_number_of_drafts(settings: dict[str, Any], lengths: tuple[int, ...]) -> None:
    speculation = Speculation(draft_tokens="auto", **settings)
    assert speculation.draft_lengths == lengths
    assert speculation.num_drafts == lengths[-1]
    fixed = Speculation(**settings)
    assert fixed.draft_lengths == (lengths[-1],)
    assert speculation.shape == fixed.shape


def test_lengths_are_logged_and_each_has_its_graphs(toy_engine: Callable[..., Engine]) -> None:
    lines: list[str] = []
    seen: list[tuple[int, int]] = []
    engine = toy_engine(
        speculation=auto("block"),
        graphs=Graphs(decode="whole"),
        max_running=4,
        log=lines.append,
        report=lambda *at: seen.append(at),
    )
    assert "draft tokens: auto, one of 0, 1, 2, 4" in lines  # the draft's blocks are of 5
    assert any("up to 4 drafted" in line for line in lines)
    layers = engine.model_config.num_layers
    assert seen[-1] == (layers + 3, layers + 3)
    assert engine.parts.worker.graphs is not None
    assert engine.parts.worker.graphs.recorded == 12
    assert engine.record().counters["draft_lengths"] == {}
    fixed = toy_engine(speculation=replace(auto("block"), draft_tokens=None), graphs=Graphs(decode="whole"))
    assert "draft_length_s" not in fixed.caps
    assert fixed.parts.worker.graphs is not None
    assert fixed.parts.worker.graphs.recorded == 4
    assert fixed.record().counters["draft_lengths"] == {}


def test_lengths_between_powers_of_two_are_recorded_when_they_are_chosen(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(speculation=auto("block"), graphs=Graphs(decode="whole"), max_running=30)
    graphs = engine.parts.worker.graphs
    assert graphs is not None
    every, lengths = 7, 4  # 1, 2, 4, 8, 16, 24, 30
    assert graphs.recorded >= (every - 1) * lengths + 1
    assert (24, Form(0), SamplingFlags(), False) in graphs._graphs
    assert (24, Form(4), SamplingFlags(), False) not in graphs._graphs
    engine.generate([[3 + index % 20, 4] for index in range(23)], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert engine.record().counters["graphs"]["decode"]["fallbacks"] == {}


def test_the_memory_plan_includes_the_graphs_of_all_lengths() -> None:
    few, many = (
        graph_bytes(Graphs(decode="whole"), most=8, chunk=64, layers=8, choices=len(lengths))
        for lengths in ((3,), (0, 1, 2, 4, 5))
    )
    assert many == 5 * few > 0
    piecewise = Graphs(prefill="piecewise")
    assert graph_bytes(piecewise, most=8, chunk=64, layers=8, choices=2) == graph_bytes(
        piecewise, most=8, chunk=64, layers=8
    )


@pytest.mark.usefixtures("toy")
def test_starts_on_a_cpu_take_few_slow_passes(
    toy_engine: Callable[..., Engine], clock: type[FakeClock], watch: Watch
) -> None:
    """Of a real model each takes a good part of a second, and its time grows with the tokens."""
    steps = watch(DecodeStep, "__call__", before=lambda _, step: (len(step.slots), step.num_drafts))
    caught_up = watch(DeviceWorker, "catch_up", before=lambda _, chunks, most: most)
    toy_engine(speculation=auto("eagle3"), max_model_len=500, max_running=2, kv_pages=400)
    assert max(Counter(steps).values()) <= 2, "with short contexts, and with long ones"
    assert caught_up
    assert max(caught_up) <= 128
