"""Advice from the records of a sweep: which configuration to use, up to which concurrency and context, and whether the
latency bound is met.

A configuration is only advised where its speedup over its base is shown: the 95% interval excludes 1 on the right side,
and still does so after Holm's correction for all configurations that were tried at that concurrency. Else the advice is
the base. With a latency bound (`--slo`) only configurations count of which enough requests met it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.config.acceptance_profile import from_counts
from specbatch.errors import listed
from specbatch.records.bases import base_in_words
from specbatch.records.estimates import CONFIDENCE, holm
from specbatch.records.intervals import Interval, Sample, over_prompts, sample
from specbatch.records.markdown import markdown_table, sum_lists
from specbatch.records.metrics import METRICS
from specbatch.records.objectives import objectives_text
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import Replicates
from specbatch.records.sweep_plan import point_of
from specbatch.records.verdicts import LOSES, ONE_REPEAT, PAYS, Speedup, speedup_of
from specbatch.sweeps.report.engine_flags import Flags, flags_of
from specbatch.sweeps.report.notes import notes
from specbatch.sweeps.report.point_notes import OTHER_MACHINE, RANDOM_PROMPTS
from specbatch.sweeps.report.points import bases, gains_of, points_of, speedups_of
from specbatch.sweeps.report.tables import table
from specbatch.sweeps.workload.settings import RANDOM

MEETS = 0.95  # of the requests of a point, for a latency bound
HEADINGS = ("concurrency", "advice", "speedup", "accept length", "break-even", "met the bound", "others")
_SPEED = METRICS["output_throughput"]
# Notes that bear on advice.
_WARNINGS = (
    "SIMULATED",
    "CHECK OUTPUTS",
    "REPEATED",
    "INCOMPLETE",
    "FAILED",
    "UNFINISHED",
    "SPECULATES",
    OTHER_MACHINE,
    RANDOM_PROMPTS,
)
_NOT_OF_TEXT = "how many drafts are accepted after them says nothing about text: use prompts of your application"


@dataclass(frozen=True)
class Option:
    """A configuration at one concurrency, relative to its base.

    pays    whether its speedup is shown, among all that were tried
    meets   whether it met the latency bound; True without one
    share   of its requests that met it
    """

    name: str
    concurrency: int
    speedup: Speedup
    pays: bool
    meets: bool
    share: float | None


@dataclass(frozen=True)
class Advice:
    """What to use. The configurations of a sweep, each at some concurrencies.

    chosen     the configuration to use; None: no speculation
    options    by concurrency, of configurations that have a base
    off_from   the lowest concurrency from which on `chosen` is not shown to pay; None if it is at the highest
    context    tokens from which on its accept length is below the break-even, with what was measured there
    """

    records: list[RunRecord]
    chosen: str | None
    options: dict[int, list[Option]]
    off_from: int | None
    context: tuple[int, str] | None

    @property
    def base(self) -> str:
        over = bases(self.records)
        return over[self.chosen or next(iter(over))]


def advise(records: list[RunRecord]) -> Advice:
    """The advice that follows from the records of a sweep."""
    options = _options(records)
    gains: dict[str, float] = {}
    for own in options.values():
        for one in own:
            if one.pays and one.meets:
                gains[one.name] = gains.get(one.name, 0.0) + math.log(one.speedup.ratio)
    chosen = max(gains, key=lambda name: gains[name]) if gains else None
    pays = {size: any(one.name == chosen and one.pays and one.meets for one in own) for size, own in options.items()}
    last = max((size for size, does in pays.items() if does), default=0)
    off_from = min((size for size in pays if size > last), default=None) if chosen else None
    context = None if chosen is None else _context_limit(records, chosen)
    return Advice(records, chosen, options, off_from, context)


def _options(records: list[RunRecord]) -> dict[int, list[Option]]:
    points, found = points_of(records), dict[int, list[Option]]()
    speedups = {point: one for point, one in speedups_of(records).items() if points[point][0].drafts}
    for concurrency in dict.fromkeys(size for size, _ in points):
        ours = {name: one for (size, name), one in speedups.items() if size == concurrency}
        tested = {name: one for name, one in ours.items() if one.verdict == PAYS and one.estimate is not None}
        tried = [_p_value(one) for one in ours.values()]
        adjusted = dict(zip(ours, holm(tried), strict=True))
        bound = _base_meets(records, concurrency)
        found[concurrency] = []
        for name, one in ours.items():
            share = _share(points[concurrency, name])
            meets = share is None or share >= MEETS
            shown = name in tested and adjusted[name] < 1 - CONFIDENCE
            # Where the base is too slow for the bound, a configuration that meets it needs no speedup.
            found[concurrency].append(Option(name, concurrency, one, shown or (meets and not bound), meets, share))
    return found


def _p_value(speedup: Speedup) -> float:
    return 1.0 if speedup.estimate is None else speedup.estimate.p_value(speedup.on_its_scale(1.0))


def _share(repeats: list[RunRecord]) -> float | None:
    """Of the requests of a point that met the latency bound; None without one."""
    known = [share for record in repeats if (share := record.metrics.get("slo_share")) is not None]
    return float(np.mean(known)) if known else None


def _base_meets(records: list[RunRecord], concurrency: int) -> bool:
    points, base = points_of(records), next(iter(dict.fromkeys(bases(records).values())))
    share = _share(points.get((concurrency, base), []))
    return share is None or share >= MEETS


def _context_limit(records: list[RunRecord], chosen: str) -> tuple[int, str] | None:
    """The context from which on the accept length of `chosen` is shown to be below its break-even, at the lowest
    concurrency where it is."""
    gains = gains_of(records)
    for (concurrency, name), repeats in points_of(records).items():
        gain = gains.get((concurrency, name))
        if name != chosen or gain is None:
            continue
        limit: tuple[int, str] | None = None
        for start, length, interval in reversed(accept_length_by_context(repeats)):
            if interval.high is None or interval.high >= gain.needed:
                break
            where = f"{length:.2f} ({interval.low:.2f}-{interval.high:.2f}), break-even {gain.needed:.2f}"
            limit = start, f"accept length {where} at concurrency {concurrency}"
        if limit is not None:
            return limit
    return None


def accept_length_by_context(repeats: list[RunRecord]) -> list[tuple[int, float, Interval]]:
    """First length of each bucket of contexts, its accept length over all repeats, and that one's interval over
    prompts."""

    def rows(record: RunRecord, start: int) -> RunRecord:
        found = []
        for row in record.requests:
            buckets = {first: counts for first, *counts in row.get("acceptance", {}).get("context", ())}
            verifies, emitted = buckets.get(start, (0, 0))
            found.append({**row, "verifies_there": verifies, "emitted_there": emitted})
        return replace(record, requests=found)

    starts = sorted({one[0] for record in repeats for one in record.counters.get("acceptance", {}).get("context", ())})
    result = []
    for start in starts:
        found = sample(("emitted_there", "verifies_there"), [rows(record, start) for record in repeats])
        if found is not None and found.bottom.sum():
            zero = Sample(np.zeros_like(found.top), np.ones_like(found.bottom), found.indices)
            spread = over_prompts(zero, found)
            result.append((start, float(found.top.sum() / found.bottom.sum()), spread))
    return result


# -- text -------------------------------------------------------------------------------------------------------------


def headline(advice: Advice) -> str:
    """What to use, in one or two sentences."""
    sizes = list(advice.options)
    base = base_in_words(advice.base)
    if advice.chosen is None:
        one_repeat = any(one.speedup.verdict == ONE_REPEAT for own in advice.options.values() for one in own)
        why = "one repeat does not show a speedup; use --repeats 3" if one_repeat else f"none is shown to beat {base}"
        return f"Use no speculation at concurrency {listed(list(map(str, sizes)))}: {why}.{_too_late(advice)}"
    parts = []
    for size, own in advice.options.items():
        found = next((one for one in own if one.name == advice.chosen and one.pays and one.meets), None)
        if found is not None:
            parts.append(f"{found.speedup} at concurrency {size}")
    text = f"Use {advice.chosen}: {base}'s tokens per second times {listed(parts)}."
    if advice.off_from is not None:
        text += f" Switch speculation off from concurrency {advice.off_from} on, where that is not shown."
    else:
        text += f" It is shown up to the highest concurrency that was measured, {max(sizes)}."
    if advice.context is not None:
        start, where = advice.context
        text += f" It does not pay after {start:,} tokens of context ({where})."
    return text + _too_late(advice)


def _too_late(advice: Advice) -> str:
    """Where neither the base nor a configuration met the latency bound."""
    late = [
        str(size)
        for size, own in advice.options.items()
        if not _base_meets(advice.records, size) and not any(one.meets for one in own)
    ]
    return f" Nothing met the latency bound at concurrency {listed(late)}." if late else ""


def advice_markdown(advice: Advice, command: str = "") -> str:
    """Headline, a line for each concurrency, drafts to choose from on servers, flags and warnings."""
    points, gains = points_of(advice.records), gains_of(advice.records)
    body = []
    for size, own in advice.options.items():
        best = _best(own, advice.chosen)
        if best is None:
            body.append([str(size), "no speculation", *["-"] * (len(HEADINGS) - 3), _others(own, None, advice)])
            continue
        gain, share = gains.get((size, best.name)), best.share
        lengths = [length for one in points[size, best.name] if (length := one.metrics.get("accept_length"))]
        body.append(
            [
                *(str(size), best.name if best.pays and best.meets else "no speculation"),
                f"{best.speedup}{'' if best.pays and best.meets else f' with {best.name}'}",
                f"{np.mean(lengths):.2f}" if lengths else "-",
                "-" if gain is None else f"{gain.needed:.2f}",
                "-" if share is None else f"{share:.0%}",
                _others(own, best, advice),
            ]
        )
    slo = advice.records[0].workload.get("slo")
    bound = f"Latency bound: {objectives_text(slo)}, met by at least {MEETS:.0%} of the requests." if slo else ""
    tried = max((len(own) for own in advice.options.values()), default=0)
    method = (
        f"Speedups are of output tok/s, with {CONFIDENCE:.0%} intervals over interleaved repeats; one is advised where "
        f"it is still shown after Holm's correction for {tried} configurations."
    )
    warnings = [str(note) for note in _warnings(advice.records)]
    flags = _flags(advice)
    parts = [
        headline(advice),
        markdown_table(body, HEADINGS),
        "\n".join(filter(None, (method, bound))),
        *fewer_drafts(advice.records),
        *(_flags_text(engine, found) for engine, found in flags.items()),
        "\n".join(f"* {line}" for line in warnings),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def advice_json(advice: Advice) -> dict[str, Any]:
    """The same as values."""
    return {
        "headline": headline(advice),
        "chosen": advice.chosen,
        "off_from_concurrency": advice.off_from,
        "off_from_context": None if advice.context is None else advice.context[0],
        "points": [
            {
                "concurrency": size,
                "configuration": one.name,
                "speedup": one.speedup.ratio,
                "low": one.speedup.low,
                "high": one.speedup.high,
                "verdict": one.speedup.verdict,
                "pays": one.pays,
                "met_bound": one.share,
            }
            for size, own in advice.options.items()
            for one in own
        ],
        "flags": {name: found._asdict() for name, found in _flags(advice).items()},
    }


def _flags(advice: Advice) -> dict[str, Flags]:
    if advice.chosen is None:
        return {}
    found = next(one for one in advice.records if one.workload["configuration"] == advice.chosen)
    return flags_of(found, advice.off_from)


def _flags_text(engine: str, flags: Flags) -> str:
    if not flags.command:
        return f"{engine}: no flags; {flags.remark}."
    return f"{engine}{f' ({flags.remark})' if flags.remark else ''}:\n\n```\n{flags.command}\n```"


def _best(own: list[Option], chosen: str | None) -> Option | None:
    """The one to use there, else the fastest."""
    good = [one for one in own if one.pays and one.meets]
    ours = next((one for one in good if one.name == chosen), None)
    return ours or max(good or own, key=lambda one: one.speedup.ratio, default=None)


def _others(own: list[Option], best: Option | None, advice: Advice) -> str:
    """What is not shown to be slower than the best, and what does not meet the bound."""
    parts = []
    if best is not None and best.pays:
        points = points_of(advice.records)
        first = _replicates(points[best.concurrency, best.name])
        alike = []
        for one in own:
            if one.name != best.name and one.meets:
                beside = speedup_of(_SPEED, first, _replicates(points[one.concurrency, one.name]))
                if beside is not None and beside.verdict != LOSES:
                    alike.append(f"{one.name} {beside}")
        if alike:
            parts.append(f"not shown to be slower: {', '.join(alike)}")
    if late := [one.name for one in own if not one.meets]:
        parts.append(f"miss the bound: {', '.join(late)}")
    return "; ".join(parts) or "-"


def _replicates(records: list[RunRecord]) -> Replicates:
    return Replicates([point_of(record).folder(Path()) for record in records], records)


def fewer_drafts(records: list[RunRecord]) -> list[str]:
    """The accept length that servers would have with fewer drafts, from acceptance by position: a server's drafter is
    what it was started with."""
    rows, names = [], dict[str, list[RunRecord]]()
    for record in records:
        if "server" in record.config:
            names.setdefault(record.workload["configuration"], []).append(record)
    for name, ours in names.items():
        own = [record.counters["acceptance"] for record in ours if "acceptance" in record.counters]
        theirs = [record.counters["server_acceptance"] for record in ours if "server_acceptance" in record.counters]
        if own:
            tried, accepted = (sum_lists(one[key] for one in own) for key in ("tried", "accepted"))
        elif theirs:
            accepted = sum_lists(one["accepted"] for one in theirs)
            tried = [sum(one["verifies"] for one in theirs), *accepted[:-1]]
        else:
            continue
        if not any(tried):
            continue
        profile = from_counts(name, tried, accepted)
        lengths = [f"{profile.accept_length(count):.2f}" for count in range(1, len(profile.conditional) + 1)]
        rows.append([name, " ".join(lengths), "" if own else "drafts after the end included"])
    title = "Accept length with 1, 2, ... drafts, by acceptance of each position:"
    return [f"{title}\n\n{markdown_table(rows, ('server', 'accept length', ''))}"] if rows else []


def _warnings(records: list[RunRecord]) -> list[str]:
    """What may make the advice wrong."""
    found = [str(note) for note in notes(records, table(records), []) if note.warning in _WARNINGS]
    if (dataset := records[0].workload.get("dataset")) in RANDOM:
        found.append(f"{RANDOM_PROMPTS}: the prompts are random ids (--dataset {dataset}); {_NOT_OF_TEXT}")
    return found
