"""What "auto" chooses: requests at once, tokens of a pass, the share of memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from specbatch.config.engine_config import LIMIT_RUNNING, EngineConfig
from specbatch.config.job_size import JobSize
from specbatch.errors import SpecbatchError
from specbatch.memory.capacity import most_that_fit, usual_fraction
from specbatch.memory.planner import MemoryPlan, MemoryShare, plan_memory
from specbatch.runtime.cuda_graphs import graph_bytes

GIB, MIB = 1 << 30, 1 << 20
JOB = JobSize(1500, 341, 217)
# A model with the shape of Qwen3-8B in BF16.
SHAPE: dict[str, Any] = {
    "model_len": 40960, "weights": 15 * GIB, "draft_weights": 0, "page_bytes": 36 * 16 * 4096, "vocabulary": 151936,
    "rows": 1, "token_bytes": 150_000, "grammars": 10 * MIB,
}  # fmt: skip


def plan(free: float, config: dict[str, Any] | None = None, *, on_cpu: bool = False, **shape: Any) -> MemoryPlan:
    numbers = SHAPE | shape
    graphs = numbers.pop("graph_bytes", None)
    made = EngineConfig(**{"job": JOB} | (config or {}))
    of_graphs = graphs or (lambda running, chunk: graph_bytes(made.graphs, most=running, chunk=chunk, layers=36))
    return plan_memory(made, free=int(free * GIB), on_cpu=on_cpu, graph_bytes=of_graphs, **numbers)


def test_a_large_card_runs_a_thousand_requests() -> None:
    found = plan(139)
    assert (found.max_running, found.prefill_chunk, found.memory_fraction) == (1024, 16384, 0.93)
    assert found.kv_pages * 16 > 1024 * (341 + 217)
    lines = "\n".join(found.lines())
    assert "max_running: 1024 (auto: more gain nothing; each holds about 449 tokens (expected))" in lines
    assert "prefill_chunk: 16384 (auto: longer passes gain nothing)" in lines
    assert "memory_fraction: 0.93 (auto: 9.73 GiB of 139.00 GiB free are left)" in lines


def test_a_cpu_keeps_small_numbers_whatever_the_job() -> None:
    for job in (JOB, JobSize(), JobSize(3)):
        found = plan(200, {"job": job}, on_cpu=True)
        assert (found.max_running, found.prefill_chunk, found.memory_fraction) == (32, 2048, 0.8)


def test_numbers_that_are_asked_for_are_used() -> None:
    asked = {"max_running": 100, "prefill_chunk": 3000, "memory_fraction": 0.5}
    found = plan(139, asked)
    assert {name: getattr(found, name) for name in asked} == asked
    assert found.reasons == {}
    assert set(plan(139, {"max_running": 100}).reasons) == {"prefill_chunk", "memory_fraction"}


@pytest.mark.parametrize("free", [20, 24, 40, 80])
def test_a_small_card_keeps_memory_for_keys_and_values(free: int) -> None:
    """As many requests as chosen fit into the pool at the length of the job."""
    found = plan(free)
    assert found.kv_pages >= found.max_running * -(-(341 + 217 // 2) // 16)
    assert found.prefill_chunk * 150_000 <= max((found.available - found.weights) // 15, 2048 * 150_000)
    assert found.max_running < 1024 or free == 80
    assert found.max_running > {20: 8, 24: 32, 40: 256, 80: 800}[free]
    assert "as many as the memory holds" in found.reasons["max_running"] or free == 80


def test_the_job_bounds_what_is_chosen() -> None:
    few = plan(139, {"job": JobSize(3, 100, 50)})
    assert (few.max_running, few.prefill_chunk) == (3, 1024)
    assert plan(139, {"job": JobSize(1, 5, 5)}).prefill_chunk == 512
    assert "the job has no more requests" in few.reasons["max_running"]
    some = plan(139, {"job": JobSize(80, 50, 50)})
    assert (some.max_running, some.prefill_chunk) == (80, 8192)
    long = plan(139, {"job": JobSize(1000, 30_000, 100)})
    assert 16 <= long.max_running <= 28
    assert long.prefill_chunk == 16384
    # A limit of answers is often far above their length; a request is never longer than max_model_len.
    assert plan(139, {"job": JobSize(10_000, 300, 32_768)}).max_running > 700
    assert plan(40, {"job": JobSize(10_000, 300, 32_768), "max_model_len": 64}).max_running > 900
    assert plan(139, {"job": JobSize()}).max_running > 600


def test_a_common_prefix_of_all_prompts_is_held_once() -> None:
    long = JobSize(1000, 30_000, 100)
    alone, shared = plan(139, {"job": long}), plan(139, {"job": replace(long, shared_tokens=29_007)})
    assert alone.max_running < 30 < shared.max_running < 1000
    held = 28_992 // 16 + shared.max_running * -(-(30_050 - 28_992) // 16)
    assert held <= shared.kv_pages < 1.1 * held
    assert "(expected), of which 28992 are a common prefix, held once" in shared.reasons["max_running"]
    assert "common prefix" not in alone.reasons["max_running"]
    without = plan(139, {"job": replace(long, shared_tokens=29_007), "prefix_cache": False})
    assert without.reasons["max_running"] == alone.reasons["max_running"]
    samples = plan(139, {"job": JobSize(64, 30_000, 1, 30_000)})  # of one prompt
    assert samples.max_running == 64


def test_drafts_states_and_experts_change_the_number() -> None:
    assert plan(139, rows=4).max_running == 1024
    assert plan(139, rows=8).max_running == 512
    assert "8 rows are verified for each request" in plan(139, rows=8).reasons["max_running"]
    assert plan(139, rows=64).max_running == 64
    assert plan(139, page_bytes=MIB // 4, is_sparse=True, config={"job": JobSize(9999, 300, 200)}).max_running == 2048
    # States of 64 MiB a slot take what keys and values do not.
    recurrent = plan(139, state_bytes=64 * MIB, page_bytes=MIB // 4)
    assert recurrent.max_running + 1 <= 139 * GIB // (64 * MIB)
    assert recurrent.max_running > 1000
    assert plan(80, state_bytes=64 * MIB, page_bytes=MIB // 4).max_running in range(512, 900)


def test_engines_that_share_a_card_choose_less() -> None:
    alone = plan(60)
    first = plan(60, share=MemoryShare(0, 2))
    assert first.max_running < alone.max_running
    assert plan(60, share=MemoryShare(replicas=2)).available == alone.available // 2
    pool = plan(139, share=MemoryShare(0, 2, pages=2000))  # its size is given
    assert (pool.max_running, pool.kv_pages) == (1024, 2000)
    assert plan(139, {"kv_pages": 3000}).max_running == 1024


def test_pages_that_are_asked_for_come_first() -> None:
    """Requests of max_model_len, or kv_pages, fit where they do with the smallest numbers."""
    small = {"max_running": 1, "prefill_chunk": 2048}
    for asked in ({"max_model_len": 27_000}, {"kv_pages": 1900}):
        assert plan(23.5, asked | small).kv_pages >= 1688
        found = plan(23.5, asked)
        assert found.kv_pages >= 1688
        assert 1 <= found.max_running <= 400
        assert found.prefill_chunk == 2048


def test_the_reserve_is_a_few_percent_of_a_large_card() -> None:
    shares = {free: usual_fraction(free * GIB, on_cpu=False) for free in (2, 8, 16, 24, 80, 139)}
    assert shares == {2: 0.7, 8: 0.7, 16: 0.82, 24: 0.86, 80: 0.92, 139: 0.93}
    assert usual_fraction(0, on_cpu=False) == 0.7


def test_small_differences_of_memory_choose_the_same() -> None:
    numbers = {plan(40 + extra / 100).max_running for extra in range(10)}
    assert len(numbers) <= 2


def test_most_that_fit() -> None:
    assert [most_that_fit(lambda count, most=most: count <= most, 9) for most in (0, 1, 5, 9, 12)] == [0, 1, 5, 9, 9]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"max_running": 100_000},
            f"max_running=100000: use a whole number of at least 1 and at most {LIMIT_RUNNING}, or auto",
        ),
        ({"max_running": 0}, "max_running=0: use a whole number of at least 1 and at most 16384, or auto"),
        ({"max_running": "many"}, "max_running='many': use a whole number"),
        ({"max_running": 2.5}, "max_running=2.5: use a whole number"),
        ({"prefill_chunk": 0}, "prefill_chunk=0: use a whole number of at least 1 and at most 2147483647, or auto"),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5: use a fraction above 0 and up to 1, or auto"),
        ({"memory_fraction": None}, "memory_fraction=None: use a fraction"),
        ({"job": 3}, "job=3: give a JobSize, such as"),
        ({"max_running": 16_384, "memory_fraction": 0.3}, "max_running=16384: logits, activations and tables take "),
    ],
)
def test_bad_numbers_are_refused_with_what_works(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecbatchError) as caught:
        plan(80, config)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"requests": 0}, {"prompt_tokens": -1}, {"new_tokens": 0}])
def test_bad_sizes_of_a_job(settings: dict[str, Any]) -> None:
    with pytest.raises(SpecbatchError, match=f"job.{next(iter(settings))}"):
        JobSize(**settings)


def test_a_replica_gets_its_share_of_the_job() -> None:
    assert JobSize(1500, 341, 217).of_one(8) == JobSize(188, 341, 217)
    assert JobSize().of_one(8) == JobSize()


def test_longer_passes_take_at_most_half_of_a_small_memory() -> None:
    """With 100 MiB more they took all but the pages of one request."""
    running = [plan(18.3 + step / 20, {"job": JobSize()}, token_bytes=500_000).max_running for step in range(200)]
    assert all(after >= before / 2 for before, after in pairwise(running))


@pytest.mark.parametrize(
    ("free", "weights", "on_cpu", "rows", "chosen"),
    [
        (6.9, 4.14, False, 17, (6, 512)),
        (20.4, 16.3, False, 17, (11, 512)),
        (40, 29.2, True, 64, (15, 2048)),
        (21.2, 15.6, True, 8, (32, 1024)),
        (21.2, 8, True, 8, (32, 2048)),
    ],
)
def test_nothing_is_refused_that_a_smaller_choice_holds(
    free: float, weights: float, on_cpu: bool, rows: int, chosen: tuple[int, int]
) -> None:
    found = plan(
        free,
        {"job": JobSize()},
        on_cpu=on_cpu,
        rows=rows,
        weights=int(weights * GIB),
        token_bytes=600_000,
        page_bytes=16 * 36864,
    )
    assert (found.max_running, found.prefill_chunk) == chosen
    assert found.kv_pages * 16 >= rows + 2
