"""Memory planner: sizes, limits and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.config.engine_config import EngineConfig
from specbatch.config.job_size import JobSize
from specbatch.errors import SpecbatchError
from specbatch.memory.planner import MemoryPlan, MemoryShare, plan_memory

MIB = 1 << 20
ON_CPU = {"free": 100_000 * MIB, "on_cpu": True, "model_len": 100_000}


def plan(free: int = 1000 * MIB, on_cpu: bool = False, **config: Any) -> MemoryPlan:
    numbers: dict[str, Any] = {"model_len": 1000, "weights": 100 * MIB, "draft_weights": 20 * MIB, "page_bytes": MIB}
    numbers |= {
        "vocabulary": 1000,
        "rows": 5,
        "state_bytes": 0,
        "cached_state_bytes": 0,
        "share": MemoryShare(),
        "grammars": 0,
        "target_page_bytes": 0,
        "token_bytes": 0,
        "is_sparse": False,
    }
    numbers |= {key: config.pop(key) for key in list(config) if key in numbers}
    settings = {"max_running": 4, "memory_fraction": 0.5} | config
    return plan_memory(EngineConfig(**settings), free=free, on_cpu=on_cpu, **numbers)


def test_kv_pool_is_what_weights_and_workspace_leave() -> None:
    found = plan()
    logits, tables = 3 * 4 * 1000 * 4 * 5, 8 * (4 + 1) * (1000 + 10 + 1) * 17 // 16
    workspace = logits + tables
    assert (found.available, found.workspace) == (500 * MIB, workspace)
    assert found.wanted_pages == 4 * -(-(1000 + 10) // 16) == 256
    assert found.kv_pages == 256
    assert found.max_model_len == 1000
    less = plan(free=600 * MIB)
    assert less.kv_pages == (300 * MIB - 120 * MIB - workspace) // MIB == 179
    assert less.kv == 179 * MIB
    assert less.wanted_pages == 256


@pytest.mark.parametrize(("count", "weights"), [(1, 500), (2, 300), (4, 640), (4, 0)])
def test_engines_share_memory_evenly_after_weights(count: int, weights: int) -> None:
    free, shares = 1000, []
    for index in range(count):
        shares.append(MemoryShare(index, count).budget(free, 0.8, weights))
        free -= shares[-1]
    assert shares[0] - weights == pytest.approx((800 - weights) / count, abs=1)
    assert shares[1:] == pytest.approx([shares[0] - weights] * (count - 1), abs=2)
    assert sum(shares) == pytest.approx(800, abs=count)


def test_engines_that_run_one_at_a_time_use_one_pool() -> None:
    """Of pages of 1 MiB, three quarters are the target's."""
    target, pages = 3 * MIB // 4, 150
    first, second = (
        plan(free=free * MIB, target_page_bytes=target, share=MemoryShare(n, 2, pages=pages))
        for n, free in enumerate((1000, 700))
    )
    assert (first.kv_pages, first.own_kv, first.weights) == (pages, first.kv, 100 * MIB)
    assert (second.kv_pages, second.own_kv, second.kv) == (pages, pages * MIB // 4, pages * MIB)
    assert (first.available, second.available, second.weights) == (500 * MIB, 350 * MIB, 0)
    assert "150.0 MiB: 150 pages of 16 tokens, 112.5 MiB of them shared" in "\n".join(second.lines())
    less = plan(free=60 * MIB, draft_weights=0, target_page_bytes=target, share=MemoryShare(1, 2, pages=pages))
    assert less.kv_pages == (30 * MIB - less.workspace) // (MIB // 4) < pages
    without_draft = plan(free=60 * MIB, target_page_bytes=MIB, share=MemoryShare(1, 2, pages=pages))
    assert (without_draft.kv_pages, without_draft.own_kv) == (pages, 0)
    with pytest.raises(SpecbatchError, match="leave no KV page"):
        plan(free=30 * MIB, target_page_bytes=MIB, share=MemoryShare(1, 2, pages=pages))


def test_first_engine_owns_the_weights() -> None:
    first, second = (plan(free=free * MIB, share=MemoryShare(n, 2)) for n, free in enumerate((1000, 700)))
    assert (first.available, first.weights) == (300 * MIB, 100 * MIB)
    assert (second.available, second.weights) == (200 * MIB, 0)
    for count in (1, 3):
        with pytest.raises(
            SpecbatchError, match=r"500\.0 MiB of 1000\.0 MiB free may be used and weights .* leave no KV page"
        ):
            plan(weights=900 * MIB, share=MemoryShare(0, count))
    with pytest.raises(SpecbatchError, match="leave no KV page"):
        plan(weights=500 * MIB, share=MemoryShare(0, 2))


def test_explicit_settings_are_used() -> None:
    found = plan(kv_pages=77, max_model_len=300, page_size=32)
    assert (found.kv_pages, found.max_model_len, found.page_size) == (77, 300, 32)
    assert found.wanted_pages == 4 * -(-310 // 32)
    assert plan(kv_pages=10).max_model_len == 10 * 16 - 10  # a small pool limits the length of requests


def test_cpu_pool_is_capped_by_default() -> None:
    large = {"free": 100_000 * MIB, "on_cpu": True, "max_running": 10, "model_len": 10_000}
    assert plan(**large).kv_pages == 4096
    assert plan(**large, kv_pages=9000).kv_pages == 9000
    assert plan(**(large | {"on_cpu": False})).kv_pages == plan(**large).wanted_pages > 4096


@pytest.mark.parametrize(
    ("settings", "named", "works"),
    [
        ({"kv_pages": 1000}, "kv_pages=1000", "at most 379"),
        ({"max_model_len": 1001}, "max_model_len=1001", "at most 1000"),
        ({"max_model_len": 500, "kv_pages": 20}, "max_model_len=500", "at most that, or kv_pages=32"),
        ({"max_model_len": 900, "free": 320 * MIB}, "max_model_len=900", "requests of 614; use at most that"),
        ({"free": 200 * MIB}, "memory_fraction=0.5", "leave no KV page; use a smaller model or dtype"),
        ({"free": 240 * MIB, "page_bytes": 60 * MIB}, "memory_fraction=0.5", "smaller model"),
        (
            {"free": 400 * MIB, "share": MemoryShare(replicas=2)},
            "memory_fraction=0.5: 100.0 MiB of 400.0 MiB free may be used by each of 2 replicas and",
            "or a memory_fraction of at least 0.609",
        ),
        ({"page_size": 2000, "page_bytes": 500 * MIB}, "page_size=2000", "a page takes 500.0 MiB and"),
        ({"page_size": 2000, "page_bytes": 500 * MIB, "free": 200 * MIB}, "memory_fraction=0.5", "leave no KV page"),
        ({"kv_pages": 2, "page_size": 4}, "kv_pages=2", "at least 3"),
        ({"kv_pages": 11, "page_size": 1}, "kv_pages=11", "at least 12"),
        ({"max_running": 16_000}, "max_running=16000", "leave no KV page; use at most"),
        ({"prefill_chunk": 10_000, "token_bytes": MIB}, "prefill_chunk=10000", "leave no KV page; use at most 378"),
        (
            {"max_running": 16_000, "prefill_chunk": 10_000, "token_bytes": MIB},
            "memory_fraction=0.5",
            "a lower max_run",
        ),
        (ON_CPU | {"max_model_len": 90_000}, "max_model_len=90000", ", or kv_pages=5626"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], named: str, works: str) -> None:
    with pytest.raises(SpecbatchError) as caught:
        plan(**settings)
    message = str(caught.value)
    assert named in message
    assert works in message
    assert "\n" not in message


def test_numbers_in_refusals_work() -> None:
    assert plan(kv_pages=379).kv_pages == 379
    assert plan(max_model_len=310, kv_pages=20).max_model_len == 310
    assert plan(max_model_len=500, kv_pages=32).max_model_len == 500
    assert plan(kv_pages=3, page_size=4).max_model_len == 2
    assert plan(400 * MIB, share=MemoryShare(replicas=2), memory_fraction=0.609).kv_pages == 1


def test_printed_plan() -> None:
    text = "\n".join(plan().lines())
    for part in (
        "memory budget: 500.0 MiB",
        "weights    100.0 MiB",
        "draft      20.0 MiB",
        "256.0 MiB: 256 pages of 16",
    ):
        assert part in text
    assert "retracted" not in text
    assert "grammars" not in text
    text = "\n".join(plan(free=600 * MIB, draft_weights=0, grammars=10 * MIB).lines())
    assert "grammars   10.0 MiB" in text
    assert "holds 189 of the 256 pages" in text
    assert "draft" not in text
    assert "2.00 GiB" in "\n".join(plan(free=4096 * MIB).lines())


def test_cached_states_have_what_requests_do_not_need() -> None:
    """Or an eighth of the memory for KV, if that is more; none without a prefix cache."""
    recurrent: dict[str, Any] = {"state_bytes": 3 * MIB, "cached_state_bytes": 2 * MIB}
    found, without = plan(**recurrent), plan(**recurrent, prefix_cache=False)
    room = without.available - without.weights - without.draft_weights - without.workspace - without.states
    assert (without.states, without.cached_states) == (15 * MIB, 0)
    assert found.cached_states == (room - found.wanted_pages * MIB) // (2 * MIB) == 54
    assert found.kv_pages == found.wanted_pages
    assert found.states == 15 * MIB + 54 * 2 * MIB
    assert any(
        line.startswith("  states     123.0 MiB of recurrent layers, including those of 54 cached prefixes")
        for line in found.lines()
    )
    assert plan(**recurrent, max_model_len=1000, model_len=5000).cached_states == 54
    assert plan(**recurrent, model_len=5000).cached_states == room // 8 // (2 * MIB) == 22
    assert plan(**recurrent, free=10_000 * MIB).cached_states == 64
    assert plan(**recurrent, free=10_000 * MIB, max_running=40).cached_states == 80
    assert plan(**(recurrent | {"cached_state_bytes": 200 * MIB})).cached_states == 0


def test_an_automatic_max_running_leaves_room_for_cached_states() -> None:
    """32 prefixes of 2,048 tokens in a model with states of 63 MiB: with 288 requests 15 states fitted."""
    recurrent: dict[str, Any] = {"state_bytes": 66 * MIB, "cached_state_bytes": 64 * MIB, "max_running": "auto"}
    recurrent |= {"free": 34_000 * MIB, "memory_fraction": 0.9, "model_len": 2432, "page_bytes": MIB // 3}
    known = {"job": JobSize(512, 2176, 256)}
    found, without = plan(**recurrent, **known), plan(**recurrent, **known, prefix_cache=False)
    assert found.cached_states == 65
    assert 0.8 < found.max_running / without.max_running < 1
    small = plan(**recurrent | {"free": 2000 * MIB}, **known)
    assert small.cached_states * 64 * MIB < small.available // 8


def test_what_is_left_for_cached_states_comes_after_what_runs() -> None:
    """Even if a pass takes much more memory than one of one token, most of it is for configured pages, or KV pages
    hold no more than one long request."""
    job = JobSize(None, 4888, 1)
    recurrent: dict[str, Any] = {"cached_state_bytes": 18 * MIB, "max_running": "auto", "job": job}
    chunk: dict[str, Any] = recurrent | {
        "prefill_chunk": 256,
        "token_bytes": MIB,
        "page_size": 1,
        "page_bytes": 2 * MIB,
    }
    assert plan(free=836 * MIB, **chunk).cached_states == 0  # 42 MiB are left
    pages = recurrent | {"state_bytes": MIB, "kv_pages": 320}
    assert plan(**pages).max_running > 40  # 380 MiB are left
    long: dict[str, Any] = recurrent | {"free": 2500 * MIB, "state_bytes": 200 * MIB, "page_bytes": MIB // 16}
    found, few = (plan(**long, model_len=most) for most in (262_144, 20_000))
    room = found.available - found.weights - found.draft_weights - found.workspace - 200 * MIB * (found.max_running + 1)
    assert found.cached_states == room // 8 // (18 * MIB) < few.cached_states
    assert (found.max_running, few.max_model_len) == (few.max_running, 20_000)
    assert plan(on_cpu=True, **long | {"model_len": 262_144}).cached_states <= found.cached_states


def test_an_automatic_max_running_grows_with_the_memory() -> None:
    recurrent: dict[str, Any] = {"state_bytes": 9 * MIB, "cached_state_bytes": 8 * MIB, "max_running": "auto"}
    recurrent |= {"prefill_chunk": 256, "token_bytes": 100_000, "page_bytes": MIB // 8}
    plans = [plan(free=free * MIB, **recurrent) for free in range(340, 4000, 61)]
    running = [found.max_running for found in plans]
    assert running == sorted(running)
    assert running[0] == 1
    assert all(found.weights + found.fixed + found.own_kv <= found.available for found in plans)


@pytest.mark.parametrize("settings", [{"kv_pages": 355}, {"max_model_len": 355 * 16 - 10, "model_len": 9000}])
def test_explicit_settings_take_precedence_over_cached_states(settings: dict[str, int]) -> None:
    found = plan(state_bytes=3 * MIB, cached_state_bytes=2 * MIB, **settings)
    assert found.cached_states == 4
    assert found.kv_pages >= 355
