"""Rules of `[bounds]`: limits of a metric, and of its change from the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator

from specbatch.errors import counted
from specbatch.evals.gate.checks import Check, Level, PendingCheck
from specbatch.evals.gate.policy import Bound
from specbatch.records.estimates import Estimate
from specbatch.records.intervals import in_common, were_interleaved
from specbatch.records.metric import Metric
from specbatch.records.metrics import METRICS
from specbatch.records.runs import Replicates
from specbatch.records.verdicts import ONE_REPEAT, Speedup, speedup_of

NOT_INTERLEAVED = (
    "not interleaved: the runs of one side came before those of the other, so the difference may come from the "
    "machine; run them alternately (A/1 B/1 B/2 A/2)"
)


def bounds(
    name: str, bound: Bound, point: str, after: Replicates, before: Replicates | None
) -> Iterator[Check | PendingCheck]:
    metric = METRICS[name]
    value, old = after.mean(name), None if before is None else before.mean(name)
    absolute = bound.at_least if metric.better == "higher" else bound.at_most
    base = "-" if before is None else _number(old)
    detail = after.resumed or "" if value is None else ""
    if absolute is not None:
        passed = _keeps(value, absolute, metric)
        yield Check(name, point, passed, _number(value), f"{_sign(metric)} {_number(absolute)}", base, detail)
    if bound.worsens_at_most is None:
        return
    title, found = f"{name} against the baseline", _number(value)
    if before is None or old is None:
        yield Check(title, point, False, found, f"the baseline lacks {name}", base, detail)
        return
    share = 1 - bound.worsens_at_most if metric.better == "higher" else 1 + bound.worsens_at_most
    allowed = f"{_sign(metric)} {_number(share * old)} ({bound.worsens_at_most:.1%} worse)"
    kept = _keeps(value, share * old, metric)
    speedup = speedup_of(metric, before, after)
    if speedup is None or speedup.estimate is None or speedup.verdict == ONE_REPEAT:  # the value decides
        found += f" ({speedup.verdict})" if speedup is not None and speedup.verdict == ONE_REPEAT else ""
        yield Check(title, point, kept, found, allowed, base, detail)
        return
    estimate, at = speedup.estimate, None if kept else speedup.on_its_scale(share)
    marks = [] if _interleaved(metric, before, after) else [NOT_INTERLEAVED]

    def judge(level: Level) -> Iterator[Check]:
        passed = True if kept else False if level.rejects else None
        about = f"; undecided about {share:g}" if passed is None and share != 1 else ""
        shown = f"{found} ({speedup.interval_text} of the baseline's, {speedup.verdict}{about})"
        lines = [] if passed else [*_needed(metric, speedup, at, level), *marks]
        yield Check(title, point, passed, shown, allowed, base, "; ".join(filter(None, (detail, *lines))))

    beyond = at is not None and _is_beyond(estimate, at, metric)
    yield PendingCheck(estimate.p_value(at) if at is not None and beyond else 1.0, judge)


def _is_beyond(estimate: Estimate, at: float, metric: Metric) -> bool:
    """Whether an estimate is worse than the bound. That of a ratio is of geometric means, which may keep a bound that
    the mean does not."""
    return (estimate.value < at) == (metric.better == "higher")


def _needed(metric: Metric, speedup: Speedup, at: float | None, level: Level) -> Iterator[str]:
    """What would decide an undecided check, and why a failed one is decided where the gate has several tests."""
    estimate = speedup.estimate
    assert estimate is not None
    assert at is not None
    if level.rejects:
        if level.tests > 1:
            yield f"p = {level.adjusted:.3g} after Holm's correction for {level.tests} tests, alpha {level.alpha:g}"
        return
    units = speedup.repeats if metric.is_time else round(estimate.freedom) + 1
    unit = "repeat" if metric.is_time else "prompt"
    more = estimate.units_for(at, level.of_one, units) if _is_beyond(estimate, at, metric) else None
    yield f"worse than allowed, but {counted(units, unit)} cannot tell that from noise" + (
        f": with such values about {counted(more, unit)} would" if more is not None else ""
    )


def _interleaved(metric: Metric, before: Replicates, after: Replicates) -> bool:
    return not metric.is_time or were_interleaved(*(point.records for point in in_common(before, after)))


def _keeps(value: float | None, limit: float, metric: Metric) -> bool:
    """Whether a value is no worse than the limit."""
    if value is None:
        return False
    return (value > limit) == (metric.better == "higher") or math.isclose(value, limit, rel_tol=1e-9)


def _sign(metric: Metric) -> str:
    return ">=" if metric.better == "higher" else "<="


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"
