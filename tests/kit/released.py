"""Checks that an idle engine holds nothing of the requests that it had."""

from __future__ import annotations

from specbatch import Engine


def check_released(engine: Engine) -> None:
    """Every page is free or held by the prefix cache alone, and every slot is free."""
    scheduler = engine.parts.scheduler
    pool, cached = scheduler.pool, len(scheduler.cache)
    assert scheduler.unfinished == 0
    assert sorted(scheduler.free_slots) == list(range(1, engine.plan.max_running + 1))
    assert pool.free + cached == pool.total
    assert pool.idle == cached
