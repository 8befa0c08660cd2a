"""The plan of a bench: configurations, sizes of engines, and lengths that a model cannot hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.engine.setup import memory_plan, prepare
from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.verify import prefix_attention_configs
from specbatch.sweeps.bench.options import BenchOptions
from specbatch.sweeps.bench.sections import plan_bench
from specbatch.weights.dummy import SHAPES

EAGLE3 = Speculation("eagle3", draft="dummy", simulate_accept_length=2.0)
TOY = EngineConfig(model="toy", load_format="dummy", device="cpu")


def configs_of(base: EngineConfig, **options: Any) -> dict[str, EngineConfig]:
    sections = plan_bench(base, BenchOptions(**options))
    return {name: config for section in sections for name, config in section.configs.items()}


def test_engines_have_room_for_their_points_and_no_more() -> None:
    configs = configs_of(TOY, ttft_tokens=(1500,))
    assert list(configs) == ["v1", "v2", "v2, 16 rows"]
    verify = configs["v2, 16 rows"]
    assert verify.speculation.num_drafts == 15
    assert {config.max_model_len for config in configs.values()} == {1508}
    assert configs["v1"].max_running == 128
    assert configs["v1"].kv_pages == 128 * -(-(1280 + 2) // 16)
    assert (verify.max_running, verify.kv_pages) == (32, 32 * -(-(800 + 32) // 16))


def test_one_long_request_always_fits() -> None:
    configs = configs_of(TOY, concurrency=(1,), batch=(1,), verify_batch=(1,), ttft_tokens=(2000,))
    assert all(16 * (config.kv_pages or 0) >= 2008 for config in configs.values())


@pytest.mark.parametrize("changes", [{"page_size": 1024}, {"page_size": 64}])
def test_a_pool_is_never_smaller_than_an_engine_takes(changes: dict[str, int]) -> None:
    configs = configs_of(replace(TOY, **changes), sections=("decode",), batch=(1,), decode_tokens=8, new_tokens=21)
    assert {config.kv_pages for config in configs.values()} == {2}


def test_a_tree_has_pages_for_the_nodes_of_its_draft() -> None:
    tree = replace(EAGLE3, draft_steps=5, draft_topk=4, draft_tokens=8)
    configs = configs_of(replace(TOY, page_size=4, speculation=tree), sections=("decode",), batch=(2,))
    assert configs["v2"].kv_pages == 2 * -(-(512 + 288 + 2 * 17) // 4)  # 17 slots per step


def test_drafting_is_compared_with_a_baseline() -> None:
    heard: list[str] = []
    base = replace(TOY, speculation=Speculation("standalone", draft="toy"), draft_attention_backend="torch")
    sections = plan_bench(base, BenchOptions(), heard.append)
    assert {section.name for section in sections} == {"decode", "closed", "ttft-128", "ttft-1024"}
    assert not any("verify" in line for line in heard)  # the user did not ask for it
    backends = {name: config.draft_attention_backend for name, config in sections[0].configs.items()}
    assert backends == {"baseline": "auto", "v1": "torch", "v2": "torch"}


def test_a_block_draft_sets_its_draft_length() -> None:
    base = replace(TOY, speculation=Speculation("dflash", draft="dummy"))
    assert configs_of(base, sections=("decode",))["v2"].speculation.num_drafts == 15


@pytest.fixture
def with_gpu(use_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a GPU can be planned, as on a machine that has one."""
    use_gpus(1)
    monkeypatch.setattr(prepare, "prefill_backend", lambda *_, **__: None)


@pytest.mark.usefixtures("with_gpu")
def test_prefill_graphs_are_measured_where_prompts_are() -> None:
    base = replace(TOY, device="cuda")
    names = {section.name: list(section.configs) for section in plan_bench(base, BenchOptions(ttft_tokens=(8,)))}
    assert names == {
        "decode": ["v1", "v2"], "closed": ["v1", "v2", "v2+piecewise"], "ttft-8": ["v1", "v2", "v2+piecewise"],
        "verify": ["v2", "v2, 16 rows"],
    }  # fmt: skip


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("speculation", "sizes"),
    [
        (Speculation(), (1, 8, 32, 128)),
        (replace(EAGLE3, simulate_accept_length=2.4), (1, 8, 32, 128)),
        (replace(EAGLE3, algorithm="dflash", simulate_accept_length=6.35), (1, 32)),
    ],
    ids=lambda item: getattr(item, "algorithm", ""),
)
def test_four_engines_of_qwen3_8b_fit_on_an_h200(
    monkeypatch: pytest.MonkeyPatch, speculation: Speculation, sizes: tuple[int, ...]
) -> None:
    """By their memory plans, if all that is planned stays taken while the next engine is built."""
    free = 139 << 30
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: free)
    monkeypatch.setattr(prefix_attention_configs, "multiprocessors", lambda _: 132)
    base = EngineConfig(model="qwen3-8b", load_format="dummy", prefill_chunk=8192, graphs=Graphs("whole", "off"))
    configs = configs_of(replace(base, speculation=speculation), batch=sizes, concurrency=sizes)
    assert len(configs) == 4
    assert configs["v2+piecewise"].graphs.prefill == "piecewise"
    for place, config in enumerate(configs.values()):
        memory = memory_plan.memory_plan(prepare.prepare(config, lambda line: None), is_shared=place > 0)
        assert memory.kv_pages == config.kv_pages
        free -= memory.weights + memory.draft_weights + memory.kv + memory.workspace + memory.graphs
    assert free > 8 << 30


def test_default_lengths_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["toy"] | {"max_position_embeddings": 64}))
    base = replace(TOY, model=str(tmp_path))
    with pytest.raises(SpecbatchError, match=r"nothing to measure: left out: input_len=1024: with 256 new tokens"):
        plan_bench(base, BenchOptions(sections=("closed",)))
    heard: list[str] = []
    assert plan_bench(base, BenchOptions(), heard.append) == []  # the machine can still be measured
    assert len(heard) == 1
