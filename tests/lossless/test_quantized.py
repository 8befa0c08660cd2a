"""Speculative decoding of quantized targets, on one device and on two, is lossless: tokens are those of the same model
with dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lossless
import pytest
import torch
from targets import QUANTIZED, SPECULATIONS, Targets
from thread_ranks import thread_group

_QUICK = {"channel": "ngram", "awq": "model-tree"}
_DRAFTERS = tuple(name for name in SPECULATIONS if "budget" not in name)  # for one device


def _cases() -> list[Any]:
    """Quick: one drafter for some. Slow: every format with every drafter."""
    found = []
    for place, target in enumerate(QUANTIZED):
        for drafter in _DRAFTERS:
            schedule, ranks = ("v1", "v2", "v2-late")[place % 3], 1 + place % 2
            if not lossless.fits(drafter, target, ranks):
                continue
            case = lossless.Case(drafter, schedule, "both" if place % 2 else "eager", "roomy", target)
            marks = () if drafter == _QUICK.get(target) else (pytest.mark.slow,)
            found.append(pytest.param(case, ranks, id=f"{case} {ranks}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "ranks"), _cases())
def test_quantized_targets_are_lossless(
    targets: Targets,
    monkeypatch: pytest.MonkeyPatch,
    case: lossless.Case,
    ranks: int,
    stay_quantized: Callable[..., None],
) -> None:
    stay_quantized()
    if ranks > 1:
        thread_group(monkeypatch)
    lossless.check(case, targets, monkeypatch, "cpu", tensor_parallel=ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("graphs", ["eager", "both"])
@pytest.mark.parametrize("target", QUANTIZED)
def test_quantized_targets_are_lossless_on_a_gpu(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, target: str, graphs: str
) -> None:
    drafter = _QUICK.get(target, "ngram")
    lossless.check(lossless.Case(drafter, "v2", graphs, "roomy", target), targets, monkeypatch, "cuda")
