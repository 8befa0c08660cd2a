"""Engines over recurrent and expert targets: targets without attention, refusals, and the memory of states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from targets import HYBRIDS, LONGEST, SIZES, WITHOUT_ATTENTION, TargetCheckpoint, Targets

from specbatch import Engine, EngineConfig, SpecbatchError
from specbatch.core.sampling_params import SamplingParams
from specbatch.models.config import ModelConfig


@pytest.mark.parametrize(
    ("name", "algorithm"), [*zip(WITHOUT_ATTENTION, ["eagle", "model-tree", "ngram-tree"], strict=True)]
)
def test_a_target_without_attention(targets: Targets, name: str, algorithm: str) -> None:
    """It has no keys and values; pages still count its tokens."""
    for settings in ({}, {"kv_pages": 50, "prefill_chunk": 5}):
        engine = targets.engine(name, algorithm, **settings)
        done = engine.generate(targets.prompts(name), SamplingParams(max_new_tokens=6, ignore_eos=True))
        assert [item.token_ids for item in done] == targets.greedy(name, 6)


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
def test_routing_and_decay_weights_must_be_finite(
    use_checkpoints: Callable[..., None], name: str, tensor: str, value: float
) -> None:
    """NaN there selects an expert or decays a state without showing in the logits."""
    broken = TargetCheckpoint(name)
    broken.tensors[tensor].view(-1)[-1] = value
    use_checkpoints(lambda *_, **__: broken)
    with pytest.raises(SpecbatchError, match=f"model='{tensor}': .* not finite"):
        Engine(EngineConfig(name, device="cpu", max_model_len=44, page_size=4))


OWN: dict[str, dict[str, Any]] = {"three": {}, "one": {"draft_tokens": 1}, "corpus": {"corpus": "run", "corpus_min": 2}}
RECURRENT = [name for name in HYBRIDS if ModelConfig.from_dict(SIZES | HYBRIDS[name]).recurrent_layers]
OWN_CASES = [(name, how) for name in RECURRENT for how in OWN]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(*case, marks=() if case in (("qwen3.5", "corpus"), ("lfm2", "three")) else pytest.mark.slow)
        for case in OWN_CASES
    ],
)
def test_every_draft_of_the_target_itself_is_accepted(targets: Targets, name: str, how: str) -> None:
    """The draft model has the target's weights, so that a rejected draft shows a wrong state: after accepted drafts,
    rejected ones (of the corpus), cached prefixes, chunks of prompts, and other requests on the same device row."""
    engine = targets.engine(name, "model", more={"draft": name} | OWN[how], prefill_chunk=5, max_running=2)
    for _ in range(2):
        done = engine.generate(targets.prompts(name), SamplingParams(max_new_tokens=LONGEST, ignore_eos=True))
        assert [item.token_ids for item in done] == targets.greedy(name, LONGEST)
    record = engine.record()
    assert record.metrics["cached_tokens"]
    total = {key: sum(row[key] for row in record.requests) for key in ("drafted", "accepted")}
    corpus = {key: sum(row[f"corpus_{key}"] for row in record.requests) for key in total}
    assert total["drafted"] > corpus["drafted"]
    assert total["drafted"] - corpus["drafted"] == total["accepted"] - corpus["accepted"]
    assert (corpus["drafted"] > corpus["accepted"]) == (how == "corpus")
    of_target, of_draft = (cache.states for cache in engine.parts.worker.caches)
    assert of_target is not None
    assert of_draft is not None
    for (_, ours), (_, theirs) in zip(of_target._kept_states, of_draft._kept_states, strict=True):
        assert ours.abs().max() > 0
        assert theirs.allclose(ours)  # of cached prefixes


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_a_draft_of_some_recurrent_layers_keeps_the_tokens(targets: Targets, name: str) -> None:
    engine = targets.engine(name, "model", more={"draft": "self:skip=1-2"})
    done = engine.generate(targets.prompts(name), SamplingParams(max_new_tokens=LONGEST, ignore_eos=True))
    assert [item.token_ids for item in done] == targets.greedy(name, LONGEST)
    assert engine.record().metrics["accept_rate"] > 0


@pytest.mark.parametrize(("more", "setting"), [({"draft_topk": 2}, "draft_topk=2"), ({"draft_tokens": "auto"}, "auto")])
def test_recurrent_drafts_are_chains_of_a_number(targets: Targets, more: dict[str, Any], setting: str) -> None:
    with pytest.raises(SpecbatchError, match=f"{setting}.*: the draft has 3 recurrent layers"):
        targets.engine("qwen3-moe", "model", more={"draft": "lfm2", "draft_tokens": None} | more)


@pytest.mark.parametrize(("algorithm", "is_tree"), [("none", False), ("ngram", False), ("ngram-tree", True)])
def test_only_trees_have_a_path(targets: Targets, algorithm: str, is_tree: bool) -> None:
    """Kernels of chains of few rows take no path."""
    [cache] = targets.engine("qwen3.5", algorithm).parts.worker.caches
    assert cache.states is not None
    assert (cache.states.replay(torch.arange(2), None).path is not None) == is_tree


def test_eagle3_layers_are_numbered_as_published(targets: Targets) -> None:
    lines: list[str] = []
    targets.engine("nemotron-h", "eagle3", log=lines.append)
    assert any("inputs of layers 1, 2, 3 of 6" in line for line in lines)


def test_prefix_cache_turns_off_without_memory_for_states(targets: Targets, use_memory: Callable[[int], None]) -> None:
    """The log and the record report it."""
    plan = targets.engine("qwen3.5", prefix_cache=False).plan
    few = 2 * (plan.weights + plan.workspace + plan.states + plan.grammars + 40 * plan.page_bytes)
    use_memory(few)
    lines: list[str] = []
    engine = targets.engine("qwen3.5", memory_fraction=0.5, prefill_chunk=plan.prefill_chunk, log=lines.append)
    done = engine.generate(targets.prompts("qwen3.5"), SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [item.token_ids for item in done] == targets.greedy("qwen3.5", 5)
    record = engine.record()
    assert (record.config["prefix_cache"], record.caps["prefix_cache"]) == (False, "off")
    assert record.caps["cached_states"] == record.metrics["cached_tokens"] == 0
    assert any(line.startswith("prefix cache: off") for line in lines)
