"""The prompts of a check: those of the package, and random ones."""

from __future__ import annotations

import json

from specbatch.sweeps.check import prompts
from specbatch.sweeps.check.options import CheckOptions


def test_bundled_prompts_are_varied_text() -> None:
    lines = [json.loads(line) for line in prompts.BUNDLED.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len({line["id"] for line in lines}) == len({line["prompt"] for line in lines}) == 32
    assert len({line["category"] for line in lines}) >= 6
    lengths = sorted(len(line["prompt"]) for line in lines)
    assert lengths[0] < 120 < 3_000 < lengths[-1]
    rows = prompts.read(CheckOptions())
    assert rows is not None
    assert [row.id for row in rows] == [line["id"] for line in lines]


def test_sampled_check_has_few_prompts() -> None:
    rows = prompts.read(CheckOptions(sampled=True))
    assert rows is not None
    assert tuple(row.id for row in rows) == prompts.SAMPLED
    assert len(prompts.read(CheckOptions(sampled=True, prompts=1)) or []) == 1
    assert prompts.read(CheckOptions(random=True)) is None
