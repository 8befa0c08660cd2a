"""Verdicts follow from intervals alone, the same for tables and `compare`."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from scipy import stats

from specbatch.records.intervals import Interval
from specbatch.records.metrics import METRICS
from specbatch.records.runs import Replicates
from specbatch.records.verdicts import (
    LOSES,
    NOT_INTERLEAVED,
    NOT_JUDGED,
    ONE_REPEAT,
    PAYS,
    UNDECIDED,
    speedup_of,
    verdict_of,
)
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
    apart = verdict_of(Interval(low, high, "", interleaved=False), better)
    assert apart == (NOT_INTERLEAVED if verdict in (PAYS, LOSES) else verdict)


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
    assert (speedup.ratio, speedup.repeats, speedup.verdict) == (
        pytest.approx((1.21 * 13 / 11 * 10.9 / 9) ** (1 / 3)),
        3,
        PAYS,
    )
    assert speedup.low is not None
    assert speedup.high is not None
    logs = [math.log(ratio) for ratio in (1.21, 13 / 11, 10.9 / 9)]
    ends = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert (speedup.low, speedup.high) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
    assert speedup.precision == pytest.approx((speedup.high - speedup.low) / 2)
    unpaired = speedup_of(SPEED, before, point("v1", {7: 121.0, 8: 130.0, 9: 109.0}))
    assert unpaired is not None
    assert unpaired.verdict == UNDECIDED, "without common rounds the machine's changes are not cancelled"
    assert unpaired.low is not None
    assert unpaired.low > 0


def test_runs_of_other_rounds_are_not_paired():
    """Welch's interval of the logarithms, also where both sides have as many runs, each slower than the one before."""
    before, after = {1: 100.0, 2: 80.0, 3: 60.0}, {4: 121.0, 5: 97.0, 6: 72.0}
    speedup = speedup_of(SPEED, point("baseline", before), point("v1", after))
    assert speedup is not None
    logs = [[math.log(value) for value in side.values()] for side in (before, after)]
    ends = stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    assert (speedup.low, speedup.high) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
    assert speedup.verdict == UNDECIDED
    paired = speedup_of(SPEED, point("baseline", before), point("v1", dict(zip(before, after.values(), strict=True))))
    assert paired is not None
    assert paired.verdict == PAYS


def test_a_clear_difference_of_runs_that_were_not_interleaved_is_no_verdict():
    before, after = point("baseline", {1: 100.0, 2: 101.0, 3: 99.0}), point("v1", {1: 150.0, 2: 151.0, 3: 149.0})
    for record in after.records:
        record.created = "2031-01-01T00:00:00+00:00"
    speedup = speedup_of(SPEED, before, after)
    assert speedup is not None
    assert speedup.low is not None
    assert (speedup.low > 1, speedup.verdict) == (True, NOT_INTERLEAVED)
    assert speedup_of(METRICS["accept_length"], before, after).verdict == UNDECIDED  # type: ignore[union-attr]


def test_rounds_that_were_added_until_precise_have_a_sequence():
    before, after = point("baseline", {1: 100.0, 2: 101.0, 3: 99.0}), point("v1", {1: 150.0, 2: 154.0, 3: 149.0})
    plain = speedup_of(SPEED, before, after)
    for record in (*before.records, *after.records):
        record.workload["until_precise"] = 0.02
    added = speedup_of(SPEED, before, after)
    assert plain is not None
    assert added is not None
    assert added.low < plain.low < plain.high < added.high  # type: ignore[operator]


@pytest.mark.parametrize("factor", [2.0, 1.3])
def test_noise_that_multiplies_both_cancels_out(factor: float):
    before = {1: 100.0, 2: 80.0, 3: 120.0}
    after = {repeat: factor * speed for repeat, speed in before.items()}
    speedup = speedup_of(SPEED, point("baseline", before), point("v2", after))
    assert speedup is not None
    assert (str(speedup), speedup.verdict) == (f"{factor:.2f} ({factor:.2f}-{factor:.2f})", PAYS)


def test_a_ratio_of_very_different_rounds_is_positive():
    speedup = speedup_of(SPEED, point("baseline", {1: 10.0, 2: 900.0}), point("v2", {1: 70.0, 2: 800.0}))
    assert speedup is not None
    assert speedup.low is not None
    assert 0 < speedup.low < speedup.ratio
    assert speedup.verdict == UNDECIDED


def test_one_repeat_of_a_time_is_no_verdict():
    before, after = point("baseline", {1: 100.0}), point("v1", {1: 120.0}, ttft=0.5)
    assert str(speedup_of(SPEED, before, after)) == "1.20 (one repeat)"
    times = speedup_of(TTFT, before, after)
    assert times is not None
    assert times.low is not None, "over its prompts there is an interval"
    assert times.verdict == ONE_REPEAT
    assert speedup_of(METRICS["accept_length"], before, after).verdict == UNDECIDED  # type: ignore[union-attr]
    assert speedup_of(METRICS["goodput"], before, after) is None
