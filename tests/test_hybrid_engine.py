"""Recurrent and expert targets through the engine: greedy tokens are those of naive decoding, whatever drafts, in every
schedule, with prompts in chunks, a prefix in common, and retractions."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hybrid_targets import HYBRIDS, MTP, SPECULATIONS, Hybrids

from specbatch import SpecbatchError
from specbatch.config import Speculation
from specbatch.draft_length import DraftLength
from specbatch.request import Request, SamplingParams
from specbatch.runner import Runner
from specbatch.scheduler import DecodePlan, Scheduler

COUNTS = {"tree": 30}  # it reserves so many slots ahead that a short text would never ask for a page more
# Mean tokens per verify: where drafts are about as often right as wrong, states take in parts of what was verified.
LEAST = {"ngram": 1.05, "ngram-tree": 1.05, "eagle": 1.3, "mtp": 1.5, "tree": 1.4}


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


@pytest.mark.parametrize("schedule", ["v1", "v2"])
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [(name, algorithm) for name in HYBRIDS for algorithm in SPECULATIONS if algorithm != "mtp" or name in MTP],
)
def test_greedy_tokens(hybrids: Hybrids, no_room: None, name: str, algorithm: str, schedule: str) -> None:
    """The families without an MTP head in this layout are not asked for one."""
    engine = hybrids.engine(name, algorithm, schedule, prefill_chunk=5)
    count = COUNTS.get(algorithm, 16)
    done = engine.generate(hybrids.prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))
    assert [item.token_ids for item in done] == hybrids.greedy(name, count)
    record = engine.record().metrics
    assert record["retractions"]
    assert record["cached_tokens"]
    assert record["accept_length"] >= LEAST.get(algorithm, 1.0)
