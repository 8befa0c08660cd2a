"""Notes below a table: plain facts, and warnings of a kind that readers can filter by.

They say what was simulated, cached, incomplete or different between configurations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import causes_of_low_acceptance
from specbatch.errors import counted
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.markdown import draft_length_lines
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.run_totals import least_values
from specbatch.records.sweep_plan import Point
from specbatch.records.verdicts import ONE_REPEAT
from specbatch.sweeps.report.note import Note, which
from specbatch.sweeps.report.point_notes import (
    failed,
    left_out,
    limits_changed,
    mixed_rounds,
    no_replays,
    of_record,
    shared,
    short_runs,
    simulated,
)
from specbatch.sweeps.report.points import SWEEP, Gain, View, gains_of, point_name, points_of
from specbatch.sweeps.report.token_notes import tokens_differ

if TYPE_CHECKING:
    import pandas as pd


# Below break-even by this share, a draft length that is chosen during the run is no loss: it is what choosing costs.
CHOOSING = 0.03
MEANS = (
    "Means over repeats (smallest-largest); latencies are over the requests of all repeats. A speedup is the geometric "
    'mean of the ratios of each round, with its 95% interval: it "pays" or "loses" where that interval excludes 1, '
    'else it is "undecided". Accept length counts the bonus token.'
)
BREAK_EVEN = (
    "Break-even: the accept length at which steps with speculation are as fast as those of the baseline (ratio of step "
    "times with the same number of requests, prompts left out); speculation pays above it. Speedup by steps: accept "
    f"length / break-even, with the {CONFIDENCE:.0%} interval of that ratio over the repeats."
)
GENERAL = (MEANS, BREAK_EVEN)  # notes that explain columns


def notes(
    records: list[RunRecord],
    rows: pd.DataFrame,
    missing: Sequence[Point] = (),
    view: View = SWEEP,
    keys: Sequence[str] | None = None,
) -> list[Note]:
    """What a reader must know before believing the table. missing: points without a record; keys: the metrics of the
    table; None: those of the view."""
    points, shown = points_of(records), view.keys if keys is None else keys
    found = [Note(MEANS)]
    if max(counts := {record.replicas for record in records}) > 1:
        replicas = f"{max(counts)} replicas" if len(counts) == 1 else "replicas of a configuration"
        text = f"Concurrency counts the requests on all {replicas}; a full batch is the share of one replica."
        found.append(Note(text))
    finished = [record for record in records if not record.error]
    found += [*failed(records), *no_replays(finished)]
    for record in finished:
        found += of_record(record)
    found += [*left_out(records), *mixed_rounds(records)]
    if "step_s" in shown:
        found += short_runs(finished)
    found += [*limits_changed(finished), *_cached(points), *_cached_states(finished), *_few_requests(points, shown)]
    found += [*shared(finished), *simulated(records), *tokens_differ(finished)]
    for (concurrency, name), repeats in points.items():
        for line in draft_length_lines((record.counters for record in repeats), repeats[0].caps):
            found.append(Note(f"{name} at concurrency {concurrency}, {line}."))
    if missing:
        configurations = {record.workload["configuration"] for record in records}
        places = _missing(missing, configurations)
        text = f"{counted(len(missing), 'point')} without a record ({places}): interrupted or failed."
        found.append(Note(text, "UNFINISHED"))
    if rows.break_even.notna().any():
        found.append(Note(BREAK_EVEN))
    if view.break_even == "all":
        gains = gains_of(records, view)
        each: list[Any] = list(rows.itertuples())
        for row in each:
            point = row.concurrency, row.configuration
            found += _disagreement(point, gains[point], row.ratio)
    return found


def _missing(missing: Sequence[Point], configurations: Collection[str]) -> str:
    """How many points of which configurations."""
    counts = Counter((point.concurrency, point.configuration) for point in missing)
    alike: dict[tuple[int, int], list[str]] = {}
    for (concurrency, name), count in counts.items():
        alike.setdefault((concurrency, count), []).append(name)
    return ", ".join(
        f"{count} of {name} at concurrency {concurrency}"
        for (concurrency, count), names in alike.items()
        for name in (["each configuration"] if len(names) > 2 and {*names} >= {*configurations} else names)
    )


def _disagreement(point: tuple[Any, ...], gain: Gain | None, ratio: float) -> Iterator[Note]:
    """A warning if steps gain and the whole run does not, or the other way round."""
    if gain is None or gain.measures_step or math.isnan(ratio) or (gain.share >= 0) == (ratio >= 1):
        return
    if gain.speedup.verdict != ONE_REPEAT and not gain.is_shown:
        return
    concurrency, name = point
    text = (
        f"{name} at concurrency {concurrency}: its speedup by steps is {gain.speedup.ratio:.2f}, but that of the "
        f"whole run is {ratio:.2f}, which includes prefill, and the end of the run with fewer requests."
    )
    yield Note(text, "STEP SPEEDUP DIFFERS")


def losses_of(records: list[RunRecord], view: View = SWEEP) -> Note | None:
    """A warning about the points at which speculation loses; None without any."""
    points, gains = points_of(records), gains_of(records, view)
    places, configs = [], []
    for point, gain in gains.items():
        record = points[point][-1]
        if gain is None or not gain.loses(CHOOSING if record.chooses_draft_length else 0.0):
            continue
        places.append(f"{point_name(*point)} (accept length {gain.accept_length:.2f}, {gain.needed:.2f} needed)")
        if record.simulated_accept_length is None:
            configs.append(record.config)
    if not places:
        return None
    causes = dict.fromkeys(
        causes_of_low_acceptance(config["speculation"]["algorithm"], config["load_format"]) for config in configs
    )
    expected = f"; if you expected a higher acceptance, likely causes: {'; '.join(causes)}" if causes else ""
    advice = f"draft fewer tokens or run fewer requests at once to lower the break-even{expected}"
    return Note(f"below break-even: {'; '.join(places)}", "LOW ACCEPTANCE", advice)


def _few_requests(points: Mapping[tuple[Any, ...], list[RunRecord]], shown: Collection[str]) -> Iterator[Note]:
    """Percentiles that some points have too few requests for."""
    tails = [metric for key in shown if (metric := METRICS[key]).percentile is not None]
    for percent, of in groupby(tails, key=lambda metric: metric.percentile):
        assert percent is not None
        missing = [
            metric.title
            for metric in of
            if any(metric.over_repeats(repeats) is None for repeats in points.values() if not repeats[0].error)
        ]
        if missing:
            names, least = " and ".join(missing), least_values(percent)
            yield Note(f"{names}: not shown for fewer than {least} requests, all repeats together.")


def _cached_states(records: list[RunRecord]) -> Iterator[Note]:
    """A warning where configurations hold the recurrent states of different numbers of prefixes."""
    recurrent = [one for one in records if one.caps.get("state_bytes")]
    held = {one.workload["configuration"]: one.caps.get("cached_states", 0) for one in recurrent}
    if len({*held.values()}) > 1:
        numbers = ", ".join(f"{count} ({name})" for name, count in held.items())
        text = f"speedups include that configurations have memory for the states of {numbers} prefixes"
        yield Note(text, "CACHES DIFFER", "a smaller --kv-pages for all leaves more room")


def _cached(points: Mapping[tuple[Any, ...], list[RunRecord]]) -> Iterator[Note]:
    """Shares of input tokens from the prefix cache, from the smallest to the largest at each concurrency."""
    found: dict[int, dict[str, list[RunRecord]]] = {}
    for (concurrency, name), repeats in points.items():
        known = [one for one in repeats if one.metrics.get("cached_tokens") and one.metrics.get("input_tokens")]
        if known:
            found.setdefault(concurrency, {})[name] = known
    parts = []
    for concurrency, own in found.items():
        records = [record for repeats in own.values() for record in repeats]
        shares = sorted((one.metrics["cached_tokens"] or 0) / (one.metrics["input_tokens"] or 1) for one in records)
        span = " to ".join(dict.fromkeys(f"{share:.1%}" for share in (shares[0], shares[-1])))
        every = [name for number, name in points if number == concurrency]
        of = "" if len(own) == len(every) else f" of {which(own, every)}"
        states = Counter[str]()
        for record in records:
            states.update(record.counters.get("states") or {})
        kept = "{kept} states of prefixes kept, {loaded} loaded, {evicted} evicted"
        parts.append(f"{span}{of} at concurrency {concurrency}{f' ({kept.format(**states)})' if states else ''}")
    if parts:
        yield Note(f"CACHED: input tokens that came from the prefix cache: {'; '.join(parts)}.")
