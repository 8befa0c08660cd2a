"""Tensor-parallel engines pass the losslessness matrix: tokens, seeds, log-probabilities, retractions and graphs."""

from __future__ import annotations

import itertools

import lossless
import pytest
from crossed import first_quick
from stand_ins import fake_graphs
from targets import Targets
from thread_ranks import thread_group

from specbatch.config.engine_config import Graphs

EVERY = [
    case
    for case in lossless.cases(("v1", "v2", "v2-late"), ("eager", "whole", "both"))
    if not case.values[0].has_budget  # for one device
    and lossless.fits(case.values[0].drafter, case.values[0].target, ranks=2)
]
QUICK = [case for case in EVERY if not case.marks][::40]
SLOW = [pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in EVERY if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_two_ranks_are_lossless(targets: Targets, monkeypatch: pytest.MonkeyPatch, case: lossless.Case) -> None:
    thread_group(monkeypatch)
    lossless.check(case, targets, monkeypatch, "cpu", tensor_parallel=2)


@pytest.mark.parametrize("drafter", first_quick(1, ["model", "ngram"]))
def test_progress_at_start_is_that_of_all_ranks(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    thread_group(monkeypatch)
    fake_graphs(monkeypatch)
    found: list[tuple[int, int]] = []
    engine = targets.engine(
        "llama", drafter, tensor_parallel=2, graphs=Graphs("whole", "piecewise"),
        report=lambda *progress: found.append(progress),
    )  # fmt: skip
    recordings = sum(len(item) for item in engine.parts.worker.recordings())
    layers = 4 * (2 if drafter == "model" else 1)
    assert found[-1] == (2 * (layers + recordings),) * 2
    assert all(before <= after for (before, _), (after, _) in itertools.pairwise(found))
