"""The result of a sweep in sentences: its headline, and how much faster each configuration is than its base."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from specbatch.errors import listed
from specbatch.records.bases import base_in_words
from specbatch.records.estimates import POWER
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.verdicts import LOSES, NOT_INTERLEAVED, ONE_REPEAT, PAYS, UNDECIDED, Speedup
from specbatch.sweeps.report.points import bases, points_of, speedups_of

DETECTABLE = f"detectable ({POWER:.0%} power)"
_MOST_DETECTABLE = 10  # as a gain: larger ones are no numbers to compare with
_VERDICTS = {PAYS: "also pays", UNDECIDED: "is undecided", LOSES: "loses"}
_SPEED = METRICS["output_throughput"]


def conclusion(speedups: Mapping[tuple[Any, ...], Speedup], bases: Mapping[str, str]) -> list[str]:
    """One sentence for each concurrency; none for a single configuration.

    speedups: by (concurrency, configuration), as `points.speedups_of` has it. bases: the configuration that each one is
    relative to.
    """
    sentences = []
    for concurrency in dict.fromkeys(number for number, _ in speedups):
        parts = ", ".join(
            _part(name, speedup, base_in_words(bases[name]))
            for (number, name), speedup in speedups.items()
            if number == concurrency
        )
        sentences.append(f"Concurrency {concurrency}, output tok/s: {parts}.")
    return [*sentences, *power_sentence(speedups.values()), *_of_one_repeat(speedups.values())]


def _part(name: str, speedup: Speedup, base: str) -> str:
    if speedup.verdict == ONE_REPEAT:
        return f"{name} is {speedup.ratio:.2f} times {base}"
    if speedup.verdict == UNDECIDED:
        return f"no difference is shown between {name} and {base} ({speedup.interval_text} times)"
    marked = f" ({speedup.verdict})" if speedup.verdict == NOT_INTERLEAVED else ""
    return f"{name} is {speedup} times {base}{marked}"


def power_sentence(speedups: Iterable[Speedup]) -> Iterator[str]:
    """How small a gain could have been seen; nothing where no interval is known."""
    if least := sorted(one.detectable for one in speedups if one.detectable is not None):
        texts = dict.fromkeys(share_text(value) for value in (least[0], least[-1]))
        yield f"{DETECTABLE}: gains of {' to '.join(texts)}."


def share_text(value: float | None) -> str:
    """A detectable gain as a percentage, which two repeats can make as large as one likes."""
    if value is None or value != value:
        return "-"
    return f"{100 * value:.1f}%" if value <= _MOST_DETECTABLE else f"over {100 * _MOST_DETECTABLE}%"


def _of_one_repeat(speedups: Iterable[Speedup]) -> Iterator[str]:
    if any(speedup.verdict == ONE_REPEAT for speedup in speedups):
        yield "One repeat does not show how much a ratio varies; use --repeats 3."


def precision_sentences(known: Mapping[tuple[Any, ...], float], wanted: float) -> list[str]:
    """One sentence for each concurrency: how exactly its ratios are known, and whether that is `wanted` (0.02: 2%).

    known: by (concurrency, configuration), as `points.precision_of` has it.
    """
    sentences = []
    for concurrency in dict.fromkeys(number for number, _ in known):
        ours = {name: share for (number, name), share in known.items() if number == concurrency}
        reached = all(share <= wanted for share in ours.values())
        verdict = "within" if reached else "STILL NOT WITHIN"
        known_to = {name: f"±{100 * share:.2g}%" if math.isfinite(share) else "unknown" for name, share in ours.items()}
        parts = ", ".join(f"{name} {text}" for name, text in known_to.items())
        text = f"Concurrency {concurrency}: the 95% intervals of the ratios are {verdict} ±{100 * wanted:g}%: {parts}"
        sentences.append(f"{text}." if reached else f"{text}; a larger --most-repeats adds rounds.")
    return sentences


def headline(records: list[RunRecord]) -> str:
    """One sentence, and another one if acceptance was simulated or the weights are random."""
    speedups = speedups_of(records)
    sentence = _compared(speedups, bases(records)) if speedups else _fastest(records)
    return " ".join(filter(None, (sentence, _caveat(records))))


def _compared(speedups: Mapping[tuple[Any, ...], Speedup], over: Mapping[str, str]) -> str:
    (concurrency, name), best = max(speedups.items(), key=lambda item: (item[1].verdict == PAYS, item[1].ratio))
    base = base_in_words(over[name])
    amount = f"times {base}'s tokens per second at concurrency {concurrency}"
    if best.verdict == ONE_REPEAT:
        return f"{name} generates {best.ratio:.2f} {amount}, in one repeat, which does not show how much that varies."
    rest = _elsewhere({size: one for (size, which), one in speedups.items() if which == name and size != concurrency})
    rest += _losses({point: one for point, one in speedups.items() if point[1] != name and one.verdict == LOSES})
    if best.verdict == PAYS:
        return f"{name} generates {best} {amount}{rest}."
    other = base if len({*over.values()}) == 1 else "the one that it is compared with"
    none = f"No configuration is shown to generate more tokens per second than {other}"
    marked = f" ({best.verdict})" if best.verdict in (LOSES, NOT_INTERLEAVED) else ""
    return f"{none}; {name} comes closest, with {best} {amount}{marked}{rest}."


def _elsewhere(others: Mapping[int, Speedup]) -> str:
    """The verdicts at other concurrencies."""
    parts = []
    for verdict, words in _VERDICTS.items():
        if sizes := [str(size) for size, one in others.items() if one.verdict == verdict]:
            parts.append(f"{words} at {listed(sizes)}")
    return f"; it {listed(parts)}" if parts else ""


def _losses(lost: Mapping[tuple[Any, ...], Speedup]) -> str:
    """Where other configurations are shown to lose."""
    found: dict[str, list[str]] = {}
    for (size, name), one in lost.items():
        found.setdefault(name, []).append(f"{size} ({one.interval_text})")
    return "".join(f"; {name} loses at {listed(places)}" for name, places in found.items())


def _fastest(records: list[RunRecord]) -> str:
    known = chain(*points_of(records).values())
    measured = [(speed, record.workload) for record in known if (speed := _SPEED.read(record)) is not None]
    if not measured:
        return "Nothing was measured."
    speed, work = max(measured, key=lambda item: item[0])
    return (
        f"{work['configuration']} generates {speed:,.0f} tokens per second at concurrency {work['concurrency']}; there "
        "is no other configuration to compare it with."
    )


def _caveat(records: list[RunRecord]) -> str:
    simulated = "acceptance was simulated" if any(record.simulated_acceptance for record in records) else ""
    dummy = "weights are random" if any(record.config["load_format"] == "dummy" for record in records) else ""
    found = " and ".join(filter(None, (simulated, dummy))).capitalize()
    return (
        f"{found}: this is the speed of the steps, not of a real draft." if simulated else f"{found}." if dummy else ""
    )
