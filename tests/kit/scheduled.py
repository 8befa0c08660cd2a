"""A scheduler of small prompts, and what it plans."""

from __future__ import annotations

from typing import Any

from specbatch.core.request import Request
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.memory.page_pool import PagePool
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.memory.state_cache import StateCache

STOP = 0


def make(pages: int = 50, **settings: Any) -> tuple[Scheduler, PagePool]:
    pool = PagePool(pages)
    settings = {
        "page_size": 4,
        "max_running": 4,
        "prefill_chunk": 100,
        "kv_slots_per_step": 1,
    } | settings
    places = settings.pop("places", 0)
    cache = PrefixCache(pool, settings["page_size"]) if settings.pop("cached", False) or places else None
    if cache is not None and places:
        settings["state_cache"] = StateCache(cache, settings["page_size"], places)
    return Scheduler(pool, cache, **settings), pool


def add(scheduler: Scheduler, index: int, prompt: int, limit: int = 20, token: int = 1) -> Request:
    params = SamplingParams(max_new_tokens=limit)
    tokens = [token] * prompt
    request = Request(index, tokens, params, end_tokens=frozenset({STOP}), decode=lambda _: "", submitted=0.0)
    scheduler.add(request)
    return request


def spans(scheduler: Scheduler) -> list[tuple[int, int, int, bool]]:
    plan = scheduler.plan_prefill(0.0)
    return [(chunk.request.index, chunk.start, chunk.end, chunk.last) for chunk in plan.chunks] if plan else []
