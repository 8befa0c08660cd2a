"""What a trace says of a run, and that waits are told by the line that waited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbatch.trace import HostWaits, text, trace


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_steps_are_recorded(toy: Any, toy_engine: Callable[..., Any], tmp_path: Path, schedule: str) -> None:
    from specbatch.config import Speculation

    engine = toy_engine(speculation=Speculation("ngram", schedule, draft_tokens=2), max_model_len=250)
    path = tmp_path / "trace.json"
    result = trace(engine, [list(prompt) for prompt in toy.prompts()[:2]], 5, path)
    assert 5 <= result["steps"] <= 7
    assert result["step_ms"] > 0
    assert result["waits"] == []  # a CPU has nothing to wait for
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert any("linear" in str(name) or "mm" in str(name) for name in names)
    assert text(result).startswith(f"{result['steps']} steps, ")
    [again] = engine.generate([list(toy.prompts()[0])])  # the engine is as good as before
    assert again.token_ids


def test_waits_are_listed_by_line_the_most_frequent_first() -> None:
    waits = HostWaits()
    waits.add("specbatch/a.py:3 f", None)
    for _ in range(4):
        waits.add("specbatch/b.py:9 g", 0.002)
    assert waits.rows(4) == [
        {"where": "specbatch/b.py:9 g", "waits": 4, "per step": 1.0, "ms": 8.0},
        {"where": "specbatch/a.py:3 f", "waits": 1, "per step": 0.25, "ms": None},
    ]
