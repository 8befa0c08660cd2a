"""Tensor parallelism over the CUDA devices of the machine: in float32 the tokens of one device."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import MTP, SIZES, TARGETS

from specbatch import Completion, Engine, EngineConfig, Graphs, SamplingParams, SpecbatchError, Speculation
from specbatch.engine.ranks import ranks
from specbatch.engine.setup.prepare import prepare

pytestmark = pytest.mark.gpu
DEVICES = torch.cuda.device_count()
each_size = pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=pytest.mark.skipif(size > DEVICES, reason=f"needs {size} CUDA devices"))
        for size in (2, 4)
    ],
)
GRAPHS = {"eager": Graphs(), "graphs": Graphs(decode="whole", prefill="piecewise")}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram-tree": {"algorithm": "ngram", "draft_steps": 3, "draft_topk": 2, "ngram_min": 1},
    "model-auto": {"algorithm": "standalone", "draft": "self:skip=1-2", "draft_tokens": "auto", "draft_steps": 3},
    "eagle": {"algorithm": "eagle", "draft": "dummy"},
    "eagle3-tree": {"algorithm": "eagle3", "draft": "dummy", "draft_steps": 3, "draft_topk": 2, "draft_tokens": 5},
    "mtp": {"algorithm": "mtp"},
    "dflash": {"algorithm": "dflash", "draft": "dummy", "draft_tokens": 3},
    "dflash2": {"algorithm": "dflash2", "draft": "dummy", "draft_tokens": 3},
    "dspark": {"algorithm": "dspark", "draft": "dummy", "draft_tokens": 3},
}
LESS_OFTEN: dict[str, dict[str, Any]] = {
    "domino": {"algorithm": "domino", "draft": "dummy", "draft_tokens": 3},
    "lilicorr": {"algorithm": "lilicorr", "draft": "dummy", "draft_tokens": 3},
    "xpress": {"algorithm": "xpress", "draft": "dummy", "draft_tokens": 3},
    "peagle": {"algorithm": "peagle", "draft": "dummy", "draft_tokens": 3},
    "dspark-tree": {"algorithm": "dspark", "draft": "dummy", "draft_steps": 3, "draft_topk": 2, "draft_tokens": 5},
    "ngram-corpus": {"algorithm": "ngram", "draft_tokens": 3, "ngram_min": 1, "corpus": "run", "corpus_min": 1},
}
SEED = 3891
EVERY = [
    (target, drafter, "v1" if (row + column) % 2 else "v2", "eager" if (row + column) % 3 == 2 else "graphs")
    for row, target in enumerate(TARGETS)
    for column, drafter in enumerate(DRAFTERS)
    if not (drafter == "model-auto" and target not in ("llama", "qwen3-moe"))  # no states that can go back
    and not (drafter == "mtp" and not target.startswith("qwen3") and target not in MTP)
] + [(target, drafter, "v2", "graphs") for target in ("llama", "gemma4", "deepseek-v3") for drafter in LESS_OFTEN]
# By default a third of them, drawn once; it has every target and every drafter, with and without graphs.
QUICK = set(random.Random(SEED).sample(range(len(EVERY)), len(EVERY) // 3))
CASES = [pytest.param(*case, marks=() if index in QUICK else pytest.mark.slow) for index, case in enumerate(EVERY)]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
PENALIZED = SamplingParams(max_new_tokens=8, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5)
SAMPLED = SamplingParams(
    max_new_tokens=8, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3, top_logprobs=2, min_tokens=4
)
PROMPTS = [
    [(7 * start + 3 * place) % 250 + 3 for place in range(size)] for start, size in enumerate((5, 40, 3, 17, 64))
]


@cache
def folder(root: Path, target: str) -> str:
    path, vocabulary = root / target, dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 301)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SIZES | TARGETS[target] | vocabulary))
    return str(path)


def config_of(model: str, drafter: str, schedule: str, graphs: str, device: str = "cuda") -> EngineConfig:
    return EngineConfig(
        model=model, load_format="dummy", device=device, dtype="float32", max_running=2, max_model_len=128,
        page_size=16, prefill_chunk=32, graphs=GRAPHS[graphs],
        speculation=Speculation(**(DRAFTERS | LESS_OFTEN)[drafter], schedule=schedule),
    )  # fmt: skip


@cache
def generated(config: EngineConfig) -> tuple[list[list[int]], list[float]]:
    """Tokens of answers, and log-likelihoods of continuations."""
    with Engine(config) as engine:
        done = [item for params in (GREEDY, PENALIZED, SAMPLED) for item in engine.generate(PROMPTS, params)]
        scores = engine.score([(PROMPTS[0], PROMPTS[1]), (PROMPTS[1], PROMPTS[3])])
    return [item.token_ids for item in done], [item.logprob for item in scores]


@pytest.mark.parametrize(("target", "drafter", "schedule", "graphs"), CASES)
@each_size
def test_ranks_generate_the_tokens_of_one_device(
    tmp_path_factory: pytest.TempPathFactory, target: str, drafter: str, schedule: str, graphs: str, size: int
) -> None:
    alone = config_of(folder(tmp_path_factory.getbasetemp(), target), drafter, schedule, graphs)
    divided = replace(alone, tensor_parallel=size)
    try:
        prepare(divided, print)
    except SpecbatchError as error:
        if size == 2 or error.setting != "tensor_parallel":
            raise
        pytest.skip(str(error))
    (one, likelihood), (parts, other) = generated(alone), generated(divided)
    assert parts[: 2 * len(PROMPTS)] == one[: 2 * len(PROMPTS)]
    # A random number may fall on the other side of a boundary; with other draft lengths, other ones are used.
    assert drafter.endswith("auto") or sum(ours != theirs for ours, theirs in zip(one, parts, strict=True)) <= 1
    assert other == pytest.approx(likelihood, abs=1e-2)


@pytest.mark.parametrize("fault", ["join", "load", "capture", "launch", "memory", "stop", "kill"])
@each_size
def test_a_fault_of_another_rank_is_one_error(
    tmp_path_factory: pytest.TempPathFactory,
    stopped_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    size: int,
) -> None:
    """Prompts are long enough for a two-shot."""
    ranks.close_groups()
    stopped_after(5)
    path = folder(tmp_path_factory.getbasetemp(), "llama")
    sizes = json.loads((Path(path) / "config.json").read_text()) | {"hidden_size": 512, "max_position_embeddings": 8192}
    (Path(path) / "wide.json").write_text(json.dumps(sizes))
    config = EngineConfig(
        model=f"{path}/wide.json", load_format="dummy", device="cuda", tensor_parallel=size, max_running=2,
        max_model_len=4096, prefill_chunk=2048, graphs=GRAPHS["graphs"],
    )  # fmt: skip
    prompts, finished = [[place % 250 + 3 for place in range(2000)]] * 12, list[Completion]()
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "FOLLOWER", "faulty_follower")
        patch.setenv("FAULT", fault)
        if fault in ("join", "load", "capture"):
            with pytest.raises(SpecbatchError, match=r"rank [1-3]\b"):
                Engine(config)
        else:
            engine = Engine(config)
            start = time.monotonic()
            with engine, pytest.raises(SpecbatchError, match=r"rank [1-3]\b"):
                engine.generate(prompts, params, on_completion=finished.append)
            assert time.monotonic() - start < 30
    with Engine(config) as engine:
        done = engine.generate(prompts[:2], GREEDY)
    assert all(
        item.token_ids == other.token_ids[: len(item.token_ids)] for item, other in zip(done, finished, strict=False)
    )
    ranks.close_groups()
