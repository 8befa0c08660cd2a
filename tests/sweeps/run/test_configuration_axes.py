"""Every option of an engine as an axis of a grid: --dry-run refuses what would not run, and the rest runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossed import slow_but
from thread_ranks import thread_group
from thread_replicas import ThreadReplicas

from specbatch.cli.configs import configured
from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions
from specbatch.cli.servers import configured_with_servers
from specbatch.config.engine_config import EngineConfig
from specbatch.config.job_size import JobSize
from specbatch.errors import SpecbatchError
from specbatch.records.sweep_plan import Point, points
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.run import loading
from specbatch.sweeps.run.benchmark import SweepOptions
from specbatch.sweeps.run.configurations import by_model
from specbatch.sweeps.run.engine_groups import LoadedGroup, groups_of, in_batches
from specbatch.sweeps.run.estimate import dry_run
from specbatch.sweeps.run.loading import check, one_group
from specbatch.sweeps.run.sweep import run_sweep
from specbatch.sweeps.workload.sharegpt import SHAREGPT
from specbatch.sweeps.workload.workloads import Workload

HEAD = {"algorithm": "eagle3", "draft": "dummy"}
MODEL = {"algorithm": "standalone", "draft": "self:skip=1-1"}
CORPUS = {"algorithm": "ngram", "corpus": "run"}
# Values of each option, and what it needs.
AXES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "model": (["toy", "toy-2"], {}),
    "device": (["cpu", "cuda:7"], {}),
    "tensor_parallel": ([1, 2], {}),
    "data_parallel": ([1, 2], {}),
    "dtype": (["float32", "bfloat16"], {}),
    "load_format": (["dummy", "gguf"], {}),
    "tokenizer": (["toy", "toy-2"], {}),
    "max_running": ([2, 4], {}),
    "max_model_len": ([64, 96], {}),
    "page_size": ([4, 8], {}),
    "kv_pages": ([40, 80], {}),
    "memory_fraction": ([0.1, 0.2], {}),
    "prefill_chunk": ([8, 16], {}),
    "prefix_cache": ([True, False], {}),
    "kv_dtype": (["auto", "fp8"], {}),
    "fp8_activations": ([True, False], {}),
    "state_dtype": (["fp32", "bf16"], {}),
    "attention_backend": (["auto", "torch"], {}),
    "draft_attention_backend": (["auto", "torch"], HEAD),
    "deterministic": ([True, False], {}),
    "seed": ([0, 1], {}),
    "decode_graph": (["off", "whole"], {}),
    "prefill_graph": (["off", "piecewise"], {}),
    "spec": (["off", "v1", "v2"], {}),
    "algorithm": (["none", "ngram"], {}),
    "draft": (["self:skip=0-0", "self:skip=1-1"], {"algorithm": "standalone"}),
    "draft_tokens": ([1, "auto"], MODEL),
    "draft_steps": ([1, 2], HEAD),
    "draft_topk": ([1, 2], HEAD),
    "aux_layers": (["1,2,3", "2,3,4"], HEAD),
    "draft_rope_theta": ([500.0, 10000.0], HEAD),
    "draft_quantization": (["fp8"], HEAD),
    "ngram_min": ([1, 2], {"algorithm": "ngram"}),
    "ngram_max": ([3, 4], {"algorithm": "ngram"}),
    "corpus": (["run", "missing.jsonl"], {"algorithm": "ngram"}),
    "corpus_tokens": ([1024, 2048], CORPUS),
    "corpus_min": ([2, 4], CORPUS),
    "verification": (["token", "block"], MODEL),
    "verify_budget": ([1.5, 2.0, "auto"], MODEL),
    "simulate_accept_length": ([1.5, 2.0], MODEL),
    "simulate_accept": (["0.5,0.4,0.3", "0.9,0.4,0.3"], MODEL),
}
OPTIONS = SweepOptions((1, 2), 2, Workload(input_len=5, output_len=4, prompts_per_concurrency=1))
ONE = SweepOptions((2,), 1, OPTIONS.workload)
REFUSED = {  # with nothing loaded
    "model": "model='toy-2': with load_format='dummy' give a config.json",
    "device": "device='cuda:7'",
    "load_format": "add load_format='dummy'",
    "tokenizer": "tokenizer='toy': no such name, file or folder",
    "kv_dtype": "one kv-dtype=fp8: kv_dtype='fp8': needs a CUDA device",
    "draft_attention_backend": "one draft-attention-backend=torch: draft_attention_backend='torch': this head has one",
    "decode_graph": "one decode-graph=whole: graphs.decode='whole': needs a CUDA device",
    "prefill_graph": "one prefill-graph=piecewise: graphs.prefill='piecewise': needs a CUDA device",
    "draft_quantization": "draft_quantization='fp8': the draft's hidden size is 64",
    "corpus": "one corpus=missing.jsonl: corpus='missing.jsonl': cannot be read",
}
RUN = ("tensor_parallel", "data_parallel", "dtype", "seed", "spec", "draft_tokens", "draft_topk", "corpus_min")
BASE = EngineOptions(model="toy", load_format="dummy", device="cpu", page_size=4, memory_fraction=0.2)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_group(monkeypatch)
    monkeypatch.setattr("specbatch.sweeps.run.estimate._speeds", lambda device: (1e9, 1e9))
    for module in ("engine", "process"):
        monkeypatch.setattr(
            f"specbatch.replicas.{module}.LocalProcesses", lambda config: ThreadReplicas(config.data_parallel)
        )


def grid(folder: Path, axis: str, values: list[Any], more: dict[str, Any]) -> dict[str, Any]:
    """The engines of a file with an axis."""
    table = {**more, axis.replace("_", "-"): values}
    lines = [f"{key.replace('_', '-')} = {json.dumps(value)}" for key, value in table.items()]
    path = folder / "grid.toml"
    path.write_text("\n".join(["[one]", *lines]) + "\n")
    return configured_with_servers(BASE, str(path), None, concurrency=2, prefix_cache=False, elsewhere=False)


def test_every_option_is_tried() -> None:
    assert AXES.keys() == ENGINE_OPTIONS.keys()


@pytest.mark.parametrize("axis", slow_but(RUN, sorted(AXES.keys() - REFUSED.keys())))
def test_an_axis_runs(tmp_path: Path, axis: str) -> None:
    for name, ours in planned_grid(tmp_path, axis, *AXES[axis]).items():
        folder = tmp_path / name
        folder.mkdir()
        run_sweep(ours, ONE, folder)
        records = load_records(folder)
        assert [record.error for record in records] == [None] * len(ours)


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_planned_or_refused(tmp_path: Path, axis: str) -> None:
    values, more = AXES[axis]
    if axis in REFUSED:
        with pytest.raises(SpecbatchError, match=REFUSED[axis]):
            planned_grid(tmp_path, axis, values, more)
        return
    planned_grid(tmp_path, axis, values, more)


def planned_grid(folder: Path, axis: str, values: list[Any], more: dict[str, Any]) -> dict[str, Any]:
    """The engines of a grid by model, after what --dry-run does."""
    models = by_model(grid(folder, axis, values, more))
    for ours in models.values():
        check(ONE.fitted(ours))
        dry_run(ours, ONE, None)
    return models


def test_what_cannot_run_among_several_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match=r"^one tensor-parallel=3: tensor_parallel=3: it must divide num_key"):
        dry_run(grid(tmp_path, "tensor_parallel", [1, 3], {}), OPTIONS, None)
    with pytest.raises(SpecbatchError, match=r"^concurrency=2: one kv-pages=3 can hold 1 of these requests"):
        dry_run(grid(tmp_path, "kv_pages", [3, 40], {}), OPTIONS, None)


def test_a_dry_run_knows_the_number_of_gpus(tmp_path: Path, use_gpus: Any) -> None:
    use_gpus(1)
    configs = grid(tmp_path, "tensor_parallel", [1, 2], {})
    for name, config in configs.items():
        object.__setattr__(config, "device", "cuda" if "2" in name else "cpu")
    with pytest.raises(SpecbatchError, match=r"tensor_parallel=2: this machine has 1 CUDA devices; use at most that"):
        dry_run(configs, OPTIONS, None)


def test_rounds_alternate_between_groups(tmp_path: Path) -> None:
    """One load for each group and round, but none where a round begins with the group that ended the one before."""
    configs = grid(tmp_path, "tensor_parallel", [1, 2], {"algorithm": "ngram", "draft_tokens": [1, 2]})
    groups = groups_of(configs)
    assert [[*group] for group in groups] == [[name for name in configs if f"parallel={n}" in name] for n in (1, 2)]
    every = list(points(configs, SweepOptions((1, 8), 3, OPTIONS.workload)))
    batches = in_batches(every, groups)
    assert [place for place, _ in batches] == [0, 1, 0, 1]
    assert [{point.repeat for point in ours} for _, ours in batches] == [{1}, {1, 2}, {2, 3}, {3}]
    assert sorted(point for _, ours in batches for point in ours) == sorted(every)
    assert all(point.configuration in groups[place] for place, ours in batches for point in ours)
    assert in_batches(every, [configs]) == [(0, every)]
    assert in_batches([], [configs]) == in_batches([], groups) == []


def test_one_group_is_open_at_a_time(tmp_path: Path) -> None:
    configs, happened = grid(tmp_path, "data_parallel", [1, 2, 3], {}), list[str]()

    @contextmanager
    def load(group: Any) -> Iterator[dict[str, Any]]:
        (name,) = group
        happened.append(f"open {name[-1]}")
        if name.endswith("3"):
            raise SpecbatchError("no")
        yield {name: BASE}
        happened.append(f"close {name[-1]}")

    BASE.tokenizer = None
    failed: dict[str, str] = {}
    with LoadedGroup(configs, load, failed) as loaded:
        for place in (0, 0, 1, 2, 2, 0):
            assert bool(loaded.engines(place)) == (place != 2)
    assert happened == ["open 1", "close 1", "open 2", "close 2", "open 3", "open 1", "close 1"]
    assert failed == {"one data-parallel=3": "no"}


def test_workers_of_a_cluster_take_one_group(tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match=r"tensor_parallel='1, 2': the workers of a cluster load their engines"):
        one_group(grid(tmp_path, "tensor_parallel", [1, 2], {}))
    one_group(configured(BASE, "baseline,v2"))
    assert in_batches([Point("a", 0, 1, 1)], [{"a": 1}]) == [(0, [Point("a", 0, 1, 1)])]


def test_memory_is_planned_for_the_answers_of_conversations(tmp_path: Path, watch: Any) -> None:
    """Where nothing else limits the requests in flight, and whose lengths only the tokenizer knows."""
    jobs = watch(loading, "load_engine", before=lambda name, config, *_, **__: config.job)
    talks = [
        {"conversations": [{"from": "human", "value": "ask" * size}, {"from": "gpt", "value": "x" * 10 * size}]}
        for size in (1, 3)
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    how: Any = {"chat_template": False, "uncapped": True, "num_prompts": 2}
    base = EngineConfig("toy", load_format="dummy", device="cpu", page_size=4, memory_fraction=0.2)
    run_sweep({"one": base}, SweepOptions((2,), 1, Workload(SHAREGPT, tmp_path / "talks.json", **how)), tmp_path)
    assert jobs == [JobSize(requests=2, prompt_tokens=6, new_tokens=20)]


@pytest.mark.parametrize("is_known", [True, False])
def test_conversations_are_those_that_fit_into_engines_of_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """An engine that is not loaded yet, on two devices, is shorter. Where only its memory decides that, its points
    fail, as their numbers would be those of other prompts."""
    values = ("x" * 9, "y" * 80)
    talks = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": "answer"}]} for asked in values
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    work = Workload(SHAREGPT, tmp_path / "talks.json", prompts_per_concurrency=1, chat_template=False)
    base = EngineConfig("toy", load_format="dummy", device="cpu", page_size=4, memory_fraction=0.2, kv_pages=80)
    configs = {"one": base, "two": replace(base, tensor_parallel=2, max_model_len=64)}
    if not is_known:
        monkeypatch.setattr("specbatch.sweeps.run.sweep.check_early", lambda *_, **__: {})
    run_sweep(configs, SweepOptions((2,), 1, work), tmp_path)
    one, two = load_records(tmp_path)
    assert one.error is None
    if is_known:
        assert one.workload["prompts_sha256"] == two.workload["prompts_sha256"]
        assert (one.workload["distinct_prompts"], two.error) == (1, None)
    else:
        assert one.workload["distinct_prompts"] == 2
        assert str(two.error).startswith("has other prompts than one")
        assert not two.metrics
