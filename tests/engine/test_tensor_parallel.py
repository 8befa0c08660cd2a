"""Tensor-parallel engines pass the losslessness matrix: tokens, seeds, log-probabilities, retractions and graphs."""

from __future__ import annotations

from typing import Any

import lossless
import pytest
from targets import Targets
from thread_ranks import thread_group

EVERY = lossless.cases(("v1", "v2", "v2-late"), ("eager", "whole", "both"))
QUICK = [case for case in EVERY if not case.marks][::12]
SLOW = [pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in EVERY if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_two_ranks_are_lossless(targets: Targets, monkeypatch: pytest.MonkeyPatch, case: lossless.Case) -> None:
    thread_group(monkeypatch)
    settings = lossless.Case.settings

    def divided(self: lossless.Case) -> dict[str, Any]:
        return settings(self) | {"tensor_parallel": 2}

    monkeypatch.setattr(lossless.Case, "settings", divided)
    lossless.check(case, targets, monkeypatch, "cpu")
