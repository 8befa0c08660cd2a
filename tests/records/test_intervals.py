"""Confidence intervals of differences, and their samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_record, metrics_of
from scipy import stats

from specbatch.records.intervals import Sample, over_prompts, over_runs, sample
from specbatch.records.metrics import METRICS


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


def test_bootstrap_has_the_distribution_of_all_resamples():
    """Of ten prompts of which one differs, a resample holds it k times with a binomial probability."""
    top = np.zeros(10)
    new = top.copy()
    new[3] = 10.0  # the mean difference of a resample is k
    samples = [Sample(part, np.ones(10), tuple(range(10))) for part in (top, new)]
    exact = stats.binom(10, 0.1).ppf([0.025, 0.975])
    found = over_prompts(*samples)
    assert (found.low, found.high) == tuple(exact) == (0.0, 3.0)
    assert over_prompts(*samples) == found  # a fixed seed


def test_bootstrap_interval_is_at_95_percent():
    """The mean of many differences is normal, so that the ends are 1.96 standard errors away (at 90%, 1.64)."""
    change = np.random.default_rng(5).normal(size=400)
    zeros, ones = np.zeros(400), np.ones(400)
    found = over_prompts(*[Sample(top, ones, tuple(range(400))) for top in (zeros, change)])
    error = change.std() / np.sqrt(len(change))
    ends = [(end - change.mean()) / error for end in (found.low, found.high)]
    assert ends == pytest.approx([-1.96, 1.96], abs=0.15)


def test_few_prompts_have_no_interval():
    part = np.ones(9)
    found = over_prompts(*[Sample(part, part, tuple(range(9)))] * 2)
    assert (found.low, found.high, found.over) == (None, None, "fewer than 10 prompts")


def test_metrics_of_few_prompts_have_no_interval():
    bottom = np.zeros(12)
    bottom[0] = 1.0  # many resamples lack the only prompt that drafted
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
