"""Recurrent and expert targets through the engine: greedy tokens are those of naive decoding, whatever drafts, in every
schedule, with prompts in chunks, a prefix in common, and retractions."""

from __future__ import annotations

import math
import random

import pytest
from crossed import slow_but
from targets import HYBRIDS, MTP, SPECULATIONS, STRENGTHS, Targets

from specbatch import SpecbatchError
from specbatch.core.request import Request, SamplingParams
from specbatch.engine.draft_length import DraftLength
from specbatch.engine.runner import Runner
from specbatch.engine.scheduler import DecodePlan, Scheduler

COUNTS = {
    "ngram-tree": 16,
    "model-tree": 25,
}  # these reserve so many slots ahead that a short text never asks for a page
PAIRS = [(name, algorithm) for name in HYBRIDS for algorithm in SPECULATIONS if algorithm != "mtp" or name in MTP]
# Mean tokens per verify: where drafts are about as often right as wrong, states take in parts of what was verified.
LEAST = {"ngram": 1.05, "ngram-tree": 1.05, "eagle": 1.3, "mtp": 1.5, "model-tree": 1.4}


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third iteration on no page is free, until a request has lost its own to another."""
    plan, retract, held, calls = Scheduler.plan_decode, Scheduler._retract, [], [0]

    def squeezed(self: Scheduler, *, may_retract: bool) -> DecodePlan | None:
        calls[0] += 1
        if calls[0] >= 3:
            self.forget_prefixes()
            held.extend(self._pool.take(self._pool.free))
        return plan(self, may_retract=may_retract)

    def relieved(self: Scheduler, request: Request) -> None:
        retract(self, request)
        calls[0] = -1000
        while held:
            self._pool.release(held.pop())

    monkeypatch.setattr(Scheduler, "plan_decode", squeezed)
    monkeypatch.setattr(Scheduler, "_retract", relieved)


@pytest.mark.parametrize("schedule", slow_but(["v2"], ["v1", "v2"]))
@pytest.mark.parametrize(("name", "algorithm"), slow_but(PAIRS[::3], PAIRS))
def test_greedy_tokens(targets: Targets, no_room: None, name: str, algorithm: str, schedule: str) -> None:
    """The families without an MTP head in this layout are not asked for one."""
    engine = targets.engine(name, algorithm, schedule, prefill_chunk=5)
    count = COUNTS.get(algorithm, 12)
    done = engine.generate(targets.prompts(name), SamplingParams(max_new_tokens=count, ignore_eos=True))
    assert [item.token_ids for item in done] == targets.greedy(name, count)
    record = engine.record().metrics
    assert record["retractions"]
    assert record["accept_length"] >= LEAST.get(algorithm, 1.0)


@pytest.mark.parametrize("algorithm", ["ngram", "eagle", "mtp", "dflash"])
@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h", "lfm2"])
def test_however_many_are_drafted(targets: Targets, monkeypatch: pytest.MonkeyPatch, name: str, algorithm: str) -> None:
    """None, one, or all, from one iteration to the next: what a verify leaves goes into a state in another one's."""
    if algorithm == "mtp" and name not in MTP:
        with pytest.raises(SpecbatchError, match="holds no tensors mtp"):
            targets.engine(name, algorithm)
        return
    chance = random.Random(3)
    monkeypatch.setattr(Runner, "time_lengths", lambda self: {})
    monkeypatch.setattr(DraftLength, "took", lambda *_: None)
    monkeypatch.setattr(DraftLength, "choose", lambda self, rows: chance.choice([0, 0, *self.lengths]))
    asked = {"draft_tokens": "auto", "draft_steps": 3}
    engine = targets.engine(name, algorithm, more=asked)
    done = engine.generate(targets.prompts(name), SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert {0, 1, 3} <= {n for row in engine.record().counters["draft_lengths"].values() for n in map(int, row)}
    assert [item.token_ids for item in done] == targets.greedy(name, 12)


ALL_RECURRENT = {
    "qwen3.5": {"layer_types": ["linear_attention"] * 4},
    "nemotron-h": {"hybrid_override_pattern": "MM-M"},
    "lfm2": {"layer_types": ["conv"] * 4},
}


@pytest.mark.parametrize(
    ("name", "algorithm"), [("qwen3.5", "eagle"), ("nemotron-h", "model-tree"), ("lfm2", "ngram-tree")]
)
def test_a_target_without_attention(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, name: str, algorithm: str
) -> None:
    """It has no keys and values; pages still count its tokens."""
    bare = f"{name} without attention"
    monkeypatch.setitem(HYBRIDS, bare, HYBRIDS[name] | ALL_RECURRENT[name])
    monkeypatch.setitem(STRENGTHS, bare, STRENGTHS[name])
    for settings in ({}, {"kv_pages": 50, "prefill_chunk": 5}):
        engine = targets.engine(bare, algorithm, **settings)
        done = engine.generate(targets.prompts(bare), SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert [item.token_ids for item in done] == targets.greedy(bare, 12)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("nemotron-h-moe", "backbone.layers.1.mixer.gate.e_score_correction_bias"),
        ("nemotron-h-moe", "backbone.layers.1.mixer.gate.weight"),
        ("nemotron-h", "backbone.layers.0.mixer.A_log"),
        ("qwen3-next", "model.layers.0.linear_attn.dt_bias"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_says_who_is_heard_is_finite(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, name: str, tensor: str, value: float
) -> None:
    """Logits would not show it."""
    broken = targets.checkpoint(name).tensors[tensor].clone()
    broken.view(-1)[-1] = value
    monkeypatch.setitem(targets.checkpoint(name).tensors, tensor, broken)
    with pytest.raises(SpecbatchError, match=f"model='{tensor}': .* not finite"):
        targets.engine(name)


@pytest.mark.parametrize("draft", ["self:skip=1", "lfm2"])
def test_a_draft_whose_states_cannot_go_back_is_refused(targets: Targets, draft: str) -> None:
    target = "qwen3-moe" if draft == "lfm2" else "qwen3.5"
    with pytest.raises(SpecbatchError, match=f"draft='{draft}': it has 3 recurrent layers.* use a draft of attention"):
        targets.engine(target, "model-tree", more={"draft": draft})


def test_heads_count_published_layers(targets: Targets) -> None:
    lines: list[str] = []
    targets.engine("nemotron-h", "eagle3", log=lines.append)
    assert any("inputs of layers 1, 2, 3 of 6" in line for line in lines)


@pytest.mark.parametrize("name", [*MTP, "nemotron-h"])
def test_a_random_mtp_head(targets: Targets, name: str) -> None:
    """Of the target's own sizes, experts among them, for speed without a download."""
    engine = targets.engine(name, "mtp", load_format="dummy")
    done = engine.generate(targets.prompts(name), SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert [item.token_ids for item in done] == targets.greedy(name, 12)
    assert engine.caps["draft_shape"] == "3 drafted"


@pytest.mark.parametrize("name", slow_but(["qwen3-moe", "qwen3-next", "nemotron-h-moe", "lfm2"], HYBRIDS))
def test_a_prefix_is_found_again(targets: Targets, name: str) -> None:
    """With its state, where there is one."""
    engine = targets.engine(name, "ngram", "v2")
    for _ in range(3):  # the second time finds where prompts part
        done = engine.generate(targets.prompts(name), SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert [item.token_ids for item in done] == targets.greedy(name, 12)
    record = engine.record()
    assert record.metrics["cached_tokens"]
    assert (record.config["prefix_cache"], record.caps["prefix_cache"]) == (True, "on")


def test_no_room_for_states_of_prefixes_is_said(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the record, too: there is no prefix cache then."""
    plan = targets.engine("qwen3.5", prefix_cache=False).plan
    few = 2 * (plan.weights + plan.workspace + plan.states + 40 * plan.page_bytes)
    monkeypatch.setattr("specbatch.engine.builder.available_memory", lambda device: few)
    lines: list[str] = []
    engine = targets.engine("qwen3.5", memory_fraction=0.5, log=lines.append)
    done = engine.generate(targets.prompts("qwen3.5"), SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [item.token_ids for item in done] == targets.greedy("qwen3.5", 5)
    record = engine.record()
    assert (record.config["prefix_cache"], record.caps["prefix_cache"]) == (False, "off")
    assert record.caps["cached_states"] == record.metrics["cached_tokens"] == 0
    assert any(line.startswith("prefix cache: off") for line in lines)
