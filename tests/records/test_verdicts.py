"""Verdicts follow from intervals alone, the same for tables and `compare`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specbatch.records.intervals import Interval
from specbatch.records.metrics import METRICS
from specbatch.records.runs import Replicates
from specbatch.records.verdicts import LOSES, NOT_JUDGED, ONE_REPEAT, PAYS, UNDECIDED, speedup_of, verdict_of
from tests.kit.made_runs import make_record, metrics_of

SPEED, TTFT = METRICS["output_throughput"], METRICS["mean_ttft_s"]


@pytest.mark.parametrize(
    ("low", "high", "better", "verdict"),
    [
        (0.1, 0.2, "higher", PAYS),
        (0.1, 0.2, "lower", LOSES),
        (-0.2, -0.1, "lower", PAYS),
        (-0.2, -0.1, "higher", LOSES),
        (-0.1, 0.2, "higher", UNDECIDED),
        (0.0, 0.2, "higher", UNDECIDED),
        (None, None, "higher", NOT_JUDGED),
        (0.1, 0.2, None, NOT_JUDGED),
    ],
)
def test_verdict_follows_from_the_interval(low, high, better, verdict):
    assert verdict_of(Interval(low, high, ""), better) == verdict
    assert verdict_of(Interval(low, high, "", one_repeat=True), better) == ONE_REPEAT


def point(name: str, speeds: dict[int, float], *, ttft: float = 0.1) -> Replicates:
    """Repeats by number, each with 12 requests."""
    draw = random.Random(0)
    records = []
    for repeat, speed in speeds.items():
        rows = [metrics_of(ttft=ttft + draw.uniform(0, 0.01)) for _ in range(12)]
        records.append(make_record(rows, configuration=name, repeat=repeat))
        records[-1].metrics |= {SPEED.key: speed}
    return Replicates([Path(f"out/{name}/c4/r{repeat}") for repeat in speeds], records)


def test_speedup_is_that_of_the_rounds_in_common():
    before = point("baseline", {1: 100.0, 2: 110.0, 3: 90.0, 4: 5.0})
    after = point("v1", {3: 109.0, 1: 121.0, 2: 130.0})  # 20 more in each round, about
    speedup = speedup_of(SPEED, before, after)
    assert speedup is not None
    assert (speedup.ratio, speedup.repeats, speedup.verdict) == (pytest.approx(1.2), 3, PAYS)
    assert speedup.low is not None
    assert speedup.high is not None
    assert 1.15 < speedup.low < 1.2 < speedup.high < 1.25
    assert speedup.precision == pytest.approx((speedup.high - speedup.low) / 2)
    assert str(speedup) == "1.20 (1.18-1.22)"
    unpaired = speedup_of(SPEED, before, point("v1", {7: 121.0, 8: 130.0, 9: 109.0}))
    assert unpaired is not None
    assert unpaired.verdict == UNDECIDED, "without common rounds the machine's changes are not cancelled"


def test_one_repeat_of_a_time_is_no_verdict():
    before, after = point("baseline", {1: 100.0}), point("v1", {1: 120.0}, ttft=0.5)
    assert str(speedup_of(SPEED, before, after)) == "1.20 (one repeat)"
    times = speedup_of(TTFT, before, after)
    assert times is not None
    assert times.low is not None, "over its prompts there is an interval"
    assert times.verdict == ONE_REPEAT
    assert speedup_of(METRICS["accept_length"], before, after).verdict == UNDECIDED  # type: ignore[union-attr]
    assert speedup_of(METRICS["goodput"], before, after) is None
