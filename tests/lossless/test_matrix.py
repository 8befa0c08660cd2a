"""Speculative decoding is lossless for every drafter, target, schedule, graph mode and memory setting."""

from __future__ import annotations

import lossless
import pytest
from targets import Targets


@pytest.mark.parametrize("case", lossless.cases(("v1", "v2", "v2-late"), ("eager", "whole", "both")))
def test_speculative_decoding_is_lossless(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, case: lossless.Case
) -> None:
    lossless.check(case, targets, monkeypatch, "cpu")
