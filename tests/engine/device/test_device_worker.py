"""The device worker: its calls are plain data, and replaying them on another worker gives the same tensors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from crossed import first_quick
from stand_ins import random_draft_lengths
from targets import SIZES, Targets
from watched_calls import Watch, watch_with

from specbatch import Engine, SamplingParams
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.engine.device.rank_calls import CALLS

PARAMS = [
    SamplingParams(
        max_new_tokens=6, ignore_eos=True, logprobs=index % 2 == 0, temperature=0.8 * (index % 3), seed=index
    )
    for index in range(6)
]


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, nested in tuples and lists or not."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for item in result or () for tensor in tensors_of(item)]


def record(worker: DeviceWorker, watch: Watch) -> list[tuple[bytes, list[torch.Tensor]]]:
    """Filled in as the worker is called: each call, pickled before it ran, and copies of its results."""
    calls: list[tuple[bytes, list[torch.Tensor]]] = []

    running: list[bytes] = []

    def end(result: Any, *_: Any) -> None:
        calls.append((running.pop(), [tensor.clone() for tensor in tensors_of(result)]))

    for name in CALLS:
        watch(
            worker,
            name,
            before=lambda *arguments, name=name: running.append(pickle.dumps((name, arguments))),
            after=end,
        )
    return calls


def state_of(worker: DeviceWorker) -> list[torch.Tensor]:
    batch, cache = worker.batch, worker.decode_step.cache
    return [batch.tokens, batch.lengths, batch.page_table, cache.keys, cache.values]


def run(engine: Engine, prompts: list[list[int]]) -> None:
    engine.generate(prompts, PARAMS)
    engine.generate(prompts[:3], PARAMS[:3])  # with the prefixes that these left
    engine.forget_prefixes()
    engine.score([(prompts[0], prompts[1]), (prompts[0], prompts[2])])


@pytest.mark.parametrize(
    ("target", "drafter", "schedule", "expected"),
    first_quick(
        6,
        [
            ("llama", "none", "v1", {"score", "assign_pages"}),
            ("llama", "model", "v2", {"add_pages"}),
            ("llama", "model-auto", "v2", {"catch_up"}),
            ("llama", "eagle-tree", "v2", set()),
            ("llama", "ngram-corpus", "v2", {"add_answers", "forget_answers"}),
            ("qwen3.5", "eagle3-auto", "v1", {"shorten"}),
            ("qwen3.5", "ngram", "v2", set()),
            ("llama", "eagle3-auto", "v2", {"catch_up"}),
        ],
    ),
)
def test_replayed_calls_give_the_same_tensors(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, target: str, drafter: str, schedule: str, expected: set[str]
) -> None:
    if drafter.endswith("auto"):
        random_draft_lengths(monkeypatch)
    first, second = (targets.engine(target, drafter, schedule, prefill_chunk=16, page_size=2) for _ in range(2))
    with monkeypatch.context() as patch:
        calls = record(first.parts.worker, watch_with(patch))
        run(first, targets.prompts(target))
    seen = set()
    with torch.inference_mode():
        for data, results in calls:
            name, arguments = pickle.loads(data)
            seen.add(name)
            replayed = tensors_of(getattr(second.parts.worker, name)(*arguments))
            assert len(replayed) == len(results)
            for ours, theirs in zip(replayed, results, strict=True):
                assert torch.equal(ours, theirs), name
    assert {"admit", "prefill", "decode"} | expected <= seen
    for ours, theirs in zip(state_of(second.parts.worker), state_of(first.parts.worker), strict=True):
        assert torch.equal(ours, theirs)


def test_a_replay_with_another_seed_differs(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (targets.engine("llama", "ngram", "v1") for _ in range(2))
    with monkeypatch.context() as patch:
        calls = record(first.parts.worker, watch_with(patch))
        first.generate(targets.prompts("llama"), SamplingParams(temperature=1.5, max_new_tokens=9, ignore_eos=True))
    with torch.inference_mode():
        for data, _ in calls:
            name, arguments = pickle.loads(data)
            if name == "admit":
                arguments = ([replace(item, seed=item.seed + 1) for item in arguments[0]],)
            getattr(second.parts.worker, name)(*arguments)
    assert not torch.equal(first.parts.worker.batch.tokens, second.parts.worker.batch.tokens)


def test_contexts_for_measurements_have_tokens_of_the_vocabulary(targets: Targets) -> None:
    """Also where that has fewer tokens than requests run at once, as with models of characters."""
    worker = targets.engine("llama", max_running=SIZES["vocab_size"] + 3).parts.worker
    worker.place(SIZES["vocab_size"] + 3, 2, 1)
    newest = worker.batch.tokens[1:, 2].tolist()
    assert set(newest) == {*range(SIZES["vocab_size"])}
