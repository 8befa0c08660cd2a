"""What the tables of a sweep and of a bench share: lines of the heading, numbers, what is said of graphs."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator

from specbatch.algorithms import causes_of_low_acceptance
from specbatch.records.run_record import CAPS, RunRecord

BREAK_EVEN = (
    "Break-even: the accept length at which steps that draft are as fast as plain decoding's beside them (step time "
    "over step time, the same number of requests, prompts left out); drafting pays above it."
)
CHOOSING = 0.03  # what drafting at the best length may lose where that is nothing
ERRORS_SHOWN = 3


def run_on(records: list[RunRecord]) -> dict[str, str]:
    """Model, device, type and versions, by the name of their line."""
    first = records[0]
    config, device = first.config, first.processor
    if "server" in config:
        device = f"unknown; asked from {device}"
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    origin = "" if config["load_format"] == "auto" else f" ({config['load_format']})"
    return {
        "model": f"{config['model']}{origin}",
        "device": f"{_resolved('device', records)} ({device})",
        "dtype": _resolved("dtype", records),
        "versions": f"unknown; asked from {versions}" if "server" in config else versions,
    }


def _resolved(name: str, records: list[RunRecord]) -> str:
    """A setting as an engine has it, or as it was asked for where no engine could be made."""
    found: str = ChainMap(*(record.caps for record in records)).get(name, records[0].config[name])
    return found


def heading(lines: dict[str, str]) -> str:
    return "".join(f"* {name}: {value}\n" for name, value in lines.items())


def caps_text(record: RunRecord, names: tuple[str, ...] = CAPS) -> str:
    """Those that the record has, but for zeros: what a model has none of."""
    found = {name: record.caps[name] for name in names if record.caps.get(name)}
    return ", ".join(f"{name} {f'{cap:.1f}' if isinstance(cap, float) else cap}" for name, cap in found.items())


def number(value: float | None, decimals: int) -> str:
    """A dash where nothing was measured."""
    return "-" if value is None or math.isnan(value) else f"{value:.{decimals}f}"


def with_spread(values: tuple[float | None, float | None, float | None], decimals: int, repeats: int) -> str:
    """Middle, smallest and largest of several repeats."""
    middle, low, high = (number(value, decimals) for value in values)
    return middle if middle == "-" or repeats < 2 else f"{middle} ({low}-{high})"


def gain_of(accept_length: float | None, needed: float | None) -> float | None:
    """What drafting gains by its steps: accept length / break-even - 1. None where that is unknown."""
    if accept_length is None or needed is None or math.isnan(accept_length) or math.isnan(needed):
        return None
    return accept_length / needed - 1


def verdict(accept_length: float | None, needed: float | None, simulated: float | None = None) -> str | None:
    """Does drafting pay? None where that is unknown. simulated: the mean of simulated accept lengths; at 1 no draft is
    accepted, which measures the step alone."""
    gain = gain_of(accept_length, needed)
    if gain is None:
        return None
    if simulated == 1:
        return f"pays above {needed:.2f}"
    return f"pays, {gain:+.1%}" if gain >= 0 else f"loses by {-gain:.1%}"


def losses(points: Iterable[tuple[str, float | None, float | None, RunRecord]]) -> str | None:
    """The warning about points at which drafting loses: (name, accept length, break-even, record) of each. None if
    there are none. A loss up to `CHOOSING` is no warning where the draft length was chosen during the run."""
    below = []
    for where, mean, needed, record in points:
        gain = None if record.simulated_accept_length == 1 else gain_of(mean, needed)
        if gain is not None and gain < (-CHOOSING if record.chooses_draft_length else 0):
            below.append((where, mean, needed, record))
    if not below:
        return None
    places = "; ".join(f"{where} (accept length {mean:.2f}, {needed:.2f} needed)" for where, mean, needed, _ in below)
    real = [record.config for *_, record in below if record.simulated_accept_length is None]
    causes = dict.fromkeys(
        causes_of_low_acceptance(config["speculation"]["algorithm"], config["load_format"]) for config in real
    )
    expected = f"; if more was to be accepted, likely causes: {'; '.join(causes)}" if causes else ""
    return f"low acceptance: below break-even: {places}\n  fewer drafts or requests at once need less of it{expected}"


def failures(record: RunRecord) -> list[tuple[str, int]]:
    """The errors of a server by what it said, the most frequent first; a few of them where they differ."""
    found = sorted(record.counters.get("errors", {}).items(), key=lambda item: -item[1])
    rest = sum(count for _, count in found[ERRORS_SHOWN:])
    return found[:ERRORS_SHOWN] + ([("other errors", rest)] if rest else [])


def replay_notes(record: RunRecord, where: str) -> Iterator[str]:
    for kind, mode in record.config["graphs"].items():
        if mode != "off":
            replays = {name: graph["replays"] for name, graph in record.graphs(kind).items()} or {kind: 0}
            for name in (name for name, count in replays.items() if not count):
                yield f"NO REPLAYS: {where}: {name.replace('_', ' ')} graphs were asked for and none was replayed."
