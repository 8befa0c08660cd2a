"""The referee: logits of the model alone, and its refusal where it does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch import EngineConfig, SpecbatchError
from specbatch.sweeps.check import referee
from specbatch.sweeps.check.referee import Referee, plan_referee

OWN = 2 * 27_000  # bytes of the toy's weights in 16 bits, roughly


@pytest.fixture
def config(open_toy: Any, use_checkpoints: Any) -> EngineConfig:
    use_checkpoints(open_toy)
    return EngineConfig(model="toy", device="cpu", dtype="bfloat16")


@pytest.mark.parametrize(("name", "close"), [("float32", 1e-4), ("same", 0.2)])
def test_referee_is_the_model(
    toy: Any, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, name: str, close: float
) -> None:
    monkeypatch.setattr(referee, "LOGIT_ROWS", 3)
    prompt, answer = toy.prompts()[8], [5, 9, 30, 4]
    found = Referee(plan_referee(config, name), 64)
    places = found.judge(prompt, answer)
    logits = toy.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    own = logits[range(4), answer]
    assert places.below == pytest.approx((logits.amax(-1) - own).tolist(), abs=close)
    assert places.scale == pytest.approx(logits.abs().amax(-1).tolist(), abs=close)
    assert places.logprobs == pytest.approx(logits.log_softmax(-1)[range(4), answer].tolist(), abs=close)
    assert found.next_logits(prompt).tolist() == pytest.approx(toy.logits(list(prompt))[-1].tolist(), abs=close)
    assert found.judge(prompt, []) == ([], [], [])


@pytest.mark.parametrize(
    ("free", "name", "message"),
    [
        (2 * OWN, "float32", r"referee='float32': its weights take .* use same, with"),
        (1000, "same", r"referee='same': .*; use none, or a smaller model"),
    ],
)
def test_referee_that_does_not_fit_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, free: int, name: str, message: str
) -> None:
    monkeypatch.setattr(referee, "available_memory", lambda device: free)
    if name == "float32":
        plan_referee(config, "same")
    with pytest.raises(SpecbatchError, match=message):
        plan_referee(config, name)
