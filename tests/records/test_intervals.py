"""Confidence intervals of differences, and their samples."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from crossed import slow_but
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_record, metrics_of
from scipy import stats

from specbatch.records.intervals import (
    Sample,
    interval,
    over_logs,
    over_prompts,
    over_runs,
    sample,
    were_interleaved,
)
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import Replicates


@given(
    before=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=10, max_size=30),
    extra=st.integers(0, 3),
    median=st.booleans(),
)
def test_common_shift_is_found_exactly(before, extra, median):
    top, bottom = (np.array(column, float) for column in zip(*before, strict=True))
    indices = tuple(range(len(top)))
    old, new = Sample(top, bottom, indices), Sample(top + extra * bottom, bottom, indices)
    found = over_prompts(old, new, median=median)
    assert (found.low, found.high) == pytest.approx((extra, extra))  # paired: every resample differs by as much


def test_pairing_removes_the_variance_between_prompts():
    rng = np.random.default_rng(3)
    hard = rng.gamma(1.0, 10.0, 40)
    ones = np.ones(40)
    change = 1 + 0.1 * rng.normal(size=40)
    pairs = [Sample(part, ones, tuple(range(40))) for part in (hard, hard + change)]
    paired = over_prompts(*pairs)
    assert paired.low < change.mean() < paired.high
    assert paired.low > 0.9
    assert paired.over == "40 prompts, paired"
    apart = over_prompts(pairs[0], Sample(pairs[1].top, ones, None))
    assert apart.low < 0 < apart.high
    assert apart.over == "40 and 40 prompts, unpaired"
    others = over_prompts(pairs[0], Sample(pairs[1].top, ones, tuple(range(1, 41))))
    assert others.over.endswith("unpaired")


def test_interval_of_a_ratio_of_sums_is_the_jackknife_with_t():
    draw = np.random.default_rng(4)
    bottom = draw.integers(1, 30, 12).astype(float)
    old, new = (Sample(draw.uniform(1, 4, 12) * bottom, bottom, tuple(range(12))) for _ in range(2))

    def change(keep):
        ratios = [side.top[keep].sum() / side.bottom[keep].sum() for side in (old, new)]
        return ratios[1] - ratios[0]

    every = np.arange(12)
    left_out = np.array([change(every != place) for place in every])
    half = stats.t.ppf(0.975, 11) * math.sqrt(11 / 12 * ((left_out - left_out.mean()) ** 2).sum())
    found = over_prompts(old, new)
    assert (found.low, found.high) == pytest.approx((change(every) - half, change(every) + half))


def test_bootstrap_of_medians_has_the_distribution_of_all_resamples():
    """Of eleven prompts of which five are slow, the median of a resample is slow if it holds six slow ones or more."""
    top = np.array([0.0] * 6 + [10.0] * 5)
    zeros, ones = np.zeros(11), np.ones(11)
    samples = [Sample(part, ones, tuple(range(11))) for part in (zeros, top)]
    found = over_prompts(*samples, median=True)
    assert (found.low, found.high) == (0.0, 10.0)
    assert over_prompts(*samples, median=True) == found  # a fixed seed
    rare = np.array([0.0] * 10 + [10.0])
    found = over_prompts(samples[0], Sample(rare, ones, tuple(range(11))), median=True)
    assert (found.low, found.high) == (0.0, 0.0), "the mean of resamples varies, the median does not"


def test_median_of_a_metric_is_not_compared_as_a_ratio_of_sums():
    """One prompt is slow: the means differ, the medians do not."""
    old, new = ([metrics_of(ttft=0.1 + place / 100) for place in range(12)] for _ in range(2))
    new[0].ttft_s = 60.0
    points = [Replicates([Path(name)], [make_record(rows)]) for name, rows in (("old", old), ("new", new))]
    found = {name: interval(METRICS[name], *points) for name in ("mean_ttft_s", "median_ttft_s")}
    assert found["mean_ttft_s"].high > 5
    assert found["median_ttft_s"].high < 0.1


@pytest.mark.parametrize("median", [False, True])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("prompts", slow_but([10], [10, 20]))
def test_intervals_over_few_prompts_hold(prompts, paired, median):
    """Equal drafts: 5% of the intervals may exclude no difference (600 samples)."""
    draw, decided = np.random.default_rng(6), 0

    def side(rate, length):
        verifies = np.maximum(1, draw.poisson(length))
        top = verifies + draw.binomial(3 * verifies, rate)
        return Sample(top.astype(float), verifies.astype(float), tuple(range(prompts)) if paired else None)

    for _ in range(600 if not median else 150):
        mixes = [(draw.beta(2, 2, prompts), draw.gamma(1.2, 15, prompts) + 2) for _ in range(2)]
        found = over_prompts(side(*mixes[0]), side(*mixes[not paired]), median=median)
        decided += found.excludes_zero
    assert decided / (600 if not median else 150) <= 0.07


def test_few_prompts_have_no_interval():
    part = np.ones(9)
    found = over_prompts(*[Sample(part, part, tuple(range(9)))] * 2)
    assert (found.low, found.high, found.over) == (None, None, "fewer than 10 prompts")


def test_metrics_of_few_prompts_have_no_interval():
    bottom = np.zeros(12)
    bottom[:9] = 1.0  # three prompts drafted nothing
    found = over_prompts(*[Sample(bottom, bottom, tuple(range(12)))] * 2)
    assert (found.low, found.over) == (None, "too few prompts have it")


def test_intervals_over_runs_by_hand():
    old, new = [10.0, 12.0, 14.0], [20.0, 21.0, 25.0]
    found = over_runs(old, new)
    a, b = np.var(old, ddof=1) / 3, np.var(new, ddof=1) / 3
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 2)  # Welch and Satterthwaite
    half = stats.t.ppf(0.975, freedom) * np.sqrt(a + b)
    assert (found.low, found.high) == pytest.approx((10 - half, 10 + half))
    within = over_runs(old, new, paired=True)
    half = stats.t.ppf(0.975, 2) * np.std([10, 9, 11], ddof=1) / np.sqrt(3)
    assert (within.low, within.high) == pytest.approx((10 - half, 10 + half))
    assert (found.over, within.over) == ("3 and 3 runs", "3 runs, paired by round")
    assert over_runs([2.0, 2.0], [3.0, 3.0]).low == 1.0  # without variance there is no t
    assert over_runs([2.0, 5.0], [3.0, 6.0], paired=True).high == 1.0


def test_interval_of_a_ratio_over_unpaired_runs_is_that_of_logarithms():
    old, new = [100.0, 110.0, 95.0], [130.0, 180.0, 150.0]
    logs = [np.log(values) for values in (old, new)]
    ends = stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    found = over_logs(old, new)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high))
    assert found.over == "3 and 3 runs"


@pytest.mark.parametrize(
    ("order", "interleaved"),
    [
        ("AB", False), ("ABAB", True), ("ABBA", True), ("AABB", False), ("BBAA", False), ("AAABABBB", False),
        ("AABABB", False), ("ABABAB", True), ("ABBAAB", True), ("BAABBA", True), ("ABBB", False), ("BABB", True),
    ],
)  # fmt: skip
def test_runs_of_which_one_side_came_first_are_not_interleaved(order, interleaved):
    runs = [(side, make_record([metrics_of()], created=f"2030-01-01T00:{n:02}")) for n, side in enumerate(order)]
    old, new = ([run for side, run in runs if side == name] for name in "AB")
    assert were_interleaved(old, new) == were_interleaved(new, old) == interleaved


def test_runs_that_were_added_until_precise_have_wider_intervals():
    old, new = [10.0, 12.0, 14.0], [20.0, 21.0, 25.0]
    for compare in (over_runs, over_logs):
        for paired in (True, False):
            plain, added = (compare(old, new, paired=paired, anytime=anytime) for anytime in (False, True))
            assert added.low < plain.low < plain.high < added.high
    two = over_logs([10.0, 11.0], [20.0, 23.0], paired=True, anytime=True)
    assert (two.low, two.over) == (None, "2 runs, paired by round: --until-precise needs three")


@pytest.mark.parametrize(
    ("before", "after", "alike"),
    [
        ({}, {}, True),
        ({}, {"schedule": "v2"}, True),
        ({"algorithm": "standalone"}, {}, False),
        ({"draft_tokens": 5}, {"draft_tokens": 3}, False),
        ({"draft_tokens": "auto"}, {"draft_tokens": "auto"}, False),  # chosen by step times
        ({"ngram_max": 8}, {}, False),
        ({"corpus": "run"}, {}, False),
        ({"verify_budget": 2.0}, {}, False),
    ],
)
def test_accept_rates_of_other_drafts_are_not_compared(before, after, alike):
    points = []
    for name, settings in (("old", before), ("new", after)):
        record = make_record([metrics_of() for _ in range(12)])
        record.config["speculation"] |= settings
        points.append(Replicates([Path(name)], [record]))
    found = interval(METRICS["accept_rate"], *points)
    assert (found.low is not None) == alike
    assert alike or found.over == "rates of other drafts (drafted tokens)"
    assert interval(METRICS["accept_length"], *points).low is not None


def test_accept_rates_of_other_default_shapes_are_not_compared():
    points = [Replicates([Path("a")], [make_record([metrics_of() for _ in range(12)])]) for _ in range(2)]
    for point, shape in zip(points, ("a chain of 3", "a chain of 5"), strict=True):
        point.records[0].caps["draft_shape"] = shape
    assert interval(METRICS["accept_rate"], *points).low is None
    points[1].records[0].config["speculation"]["draft_tokens"] = 3  # the default of the other, named
    points[1].records[0].caps["draft_shape"] = "a chain of 3"
    assert interval(METRICS["accept_rate"], *points).low is not None


# Samples give the metrics of the record


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(10, 30), st.floats(0.01, 2)), min_size=1, max_size=12))
def test_samples_give_the_metrics_of_the_record(rows):
    made = [metrics_of(verifies=v, emitted=e, ttft=t) for v, e, t in rows]
    made[-1].tpot_s = None  # none for a single token
    record = make_record(made)
    for name, metric in METRICS.items():
        if metric.per_request is None or record.metrics[name] is None:
            continue
        found = sample(metric.per_request, [record])
        assert found is not None
        of = np.nanmedian(found.top / np.where(found.bottom, found.bottom, np.nan)) if metric.is_median else None
        assert (of if metric.is_median else found.top.sum() / found.bottom.sum()) == pytest.approx(record.metrics[name])


def test_repeats_are_summed_by_prompt_in_any_order():
    first, second = (make_record([metrics_of(ttft=t) for t in times]) for times in ([1, 2, 3], [10, 20, 30]))
    second.requests.reverse()
    found = sample(("ttft_s", None), [first, second])
    assert found is not None
    assert found.top.tolist() == [11, 22, 33]
    assert found.bottom.tolist() == [2, 2, 2]
    first.requests[0]["finish_reason"] = "abort"
    found = sample(("ttft_s", None), [first, second])
    assert found is not None
    assert (found.top[0], found.bottom[0]) == (10, 1)


def test_rows_without_their_prompt_do_not_pair():
    record = make_record([metrics_of(), metrics_of()])
    for row in record.requests:
        row["index"] = 0  # requests sent one by one
    found = sample(("ttft_s", None), [record])
    assert found is not None
    assert found.indices is None
    assert sample(("nothing", None), [record]) is None
    record.requests = []
    assert sample(("ttft_s", None), [record]) is None


def test_turns_of_a_conversation_are_one_prompt_of_a_ratio():
    """Three conversations of up to two turns: their requests are numbered by turn and then by conversation."""

    def record(emitted: list[int]) -> RunRecord:
        made = make_record([metrics_of(verifies=2, emitted=count) for count in emitted], prompts=3)
        for row in made.requests:
            row["turn"] = 1 + row["index"] // 3
        return made

    first, second = record([4, 5, 6, 7, 8]), record([1, 1, 1, 1, 1])
    found = sample(("emitted", "verify_steps"), [first])
    assert found is not None
    assert (found.top.tolist(), found.bottom.tolist(), found.indices) == ([11, 13, 6], [4, 4, 2], (0, 1, 2))
    both = sample(("emitted", "verify_steps"), [first, second])
    assert both is not None
    assert both.top.tolist() == [13, 15, 7]
    of_requests = sample(("ttft_s", None), [first])
    assert of_requests is not None
    assert len(of_requests.top) == 5
    second.requests = second.requests[1:2]
    part = sample(("emitted", "verify_steps"), [first, second])
    assert part is not None
    assert part.indices is None
