"""Summarizes a sweep in sentences: how much faster each configuration is than the one it is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specbatch.records.bases import base_in_words
from specbatch.records.verdicts import NOT_INTERLEAVED, ONE_REPEAT, UNDECIDED, Speedup


def conclusion(speedups: Mapping[tuple[Any, ...], Speedup], bases: Mapping[str, str]) -> list[str]:
    """One sentence for each concurrency; none for a single configuration.

    speedups: by (concurrency, configuration), as `tables.speedups_of` has it. bases: the configuration that each one is
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
    return [*sentences, *_caveat(speedups.values())]


def _part(name: str, speedup: Speedup, base: str) -> str:
    if speedup.verdict == ONE_REPEAT:
        return f"{name} is {speedup.ratio:.2f} times {base}"
    if speedup.verdict == UNDECIDED:
        return f"no difference is shown between {name} and {base} ({speedup.interval_text} times)"
    marked = f" ({speedup.verdict})" if speedup.verdict == NOT_INTERLEAVED else ""
    return f"{name} is {speedup} times {base}{marked}"


def _caveat(speedups: Iterable[Speedup]) -> Iterator[str]:
    if any(speedup.verdict == ONE_REPEAT for speedup in speedups):
        yield "One repeat does not show how much a ratio varies; use --repeats 3."


def precision_sentences(known: Mapping[tuple[Any, ...], float], wanted: float) -> list[str]:
    """One sentence for each concurrency: how exactly its ratios are known, and whether that is `wanted` (0.02: 2%).

    known: by (concurrency, configuration), as `tables.precision_of` has it.
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
