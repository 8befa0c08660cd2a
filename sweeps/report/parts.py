"""One table of sweeps that differ in one thing, such as the length of the prompts; each has its points in a folder.

What they differ in follows from their plans: `thinking`, `input_len`, `scramble`, `request_rate` or the model.
Acceptance is that of the highest concurrency, which has the most prompts, and its changes are from the first part,
prompt by prompt.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from specbatch.errors import listed
from specbatch.files.atomic_file import write_atomic, writing
from specbatch.files.text_files import read_json
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.markdown import markdown_table
from specbatch.records.reasoning import parts_table
from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import PLAN, unfinished
from specbatch.records.verdicts import Speedup
from specbatch.sweeps.report.acceptance import AcceptChange, accept_change
from specbatch.sweeps.report.across import across_markdown
from specbatch.sweeps.report.heading import about, heading
from specbatch.sweeps.report.point_notes import failed, left_out, mixed_rounds, simulated
from specbatch.sweeps.report.points import POINT, SWEEP, bases, gains_of, load_records, points_of, speedups_of
from specbatch.sweeps.report.sentences import DETECTABLE, share_text
from specbatch.sweeps.report.tables import as_json, decision, table

THINKING, MODEL, RATE = "thinking", "model", "request_rate"
RECORDS = "*/c*/r*/record.json"  # in the folder of a part
MODES = {"on": True, "off": False}
# Fields of a workload, as headings.
_AXES = {"input_len": "input tokens", THINKING: THINKING, "scramble": "scramble", RATE: "request rate"}
EVERY_POINT = "Every point:"  # the short tables end here
NOT_MEASURED = "not measured"  # in place of a verdict
_ORDER = ("on", "off", "none", "shuffled", "random")


def rate_of(workload: Mapping[str, Any]) -> float:
    """The request rate of a plan's or a record's workload; inf: a closed loop, or all requests at once."""
    rate = workload.get(RATE)
    return math.inf if rate is None else float(rate)


def label_of(value: object) -> str:
    """What a part is called by its value of the field."""
    if isinstance(value, float):
        return f"{value:g}"
    return next((mode for mode, is_on in MODES.items() if value is is_on), str(value))


def folders_of(folder: Path, axis: str = THINKING, labels: tuple[str, ...] = tuple(MODES)) -> dict[str, Path]:
    """The folder of each part, by its label."""
    return {label: folder / f"{axis.replace('_', '-')}-{label}" for label in labels}


@dataclass(frozen=True)
class Parts:
    """Sweeps by their label. axis: the field that they differ in, or "model"."""

    axis: str
    folders: dict[str, Path]
    records: dict[str, list[RunRecord]]

    @property
    def title(self) -> str:
        return _AXES.get(self.axis, self.axis)

    @property
    def unfinished(self) -> list[str]:
        return [label for label, path in self.folders.items() if label not in self.records or unfinished(path)]


def load_parts(folder: Path, axis: str | None = None) -> Parts | None:
    """The sweeps in the folders below `folder`; None if there are none, or if they differ in nothing that is known.
    axis: where one part alone has begun."""
    plans = {path.parent: read_json("folder", path) for path in sorted(folder.glob(f"*/{PLAN}"))}
    plans = {path: plan for path, plan in plans.items() if "workload" in plan}
    begun = {path for path in plans if any(path.glob(RECORDS))}
    differing = [name for name in _AXES if len({_label(plan, name) for plan in plans.values()}) > 1]
    if len({str(_models(plan)) for plan in plans.values()}) > 1:
        differing.append(MODEL)
    found = axis or next(iter(differing), None)
    if found is None or not begun:
        return None
    labels = {path: _label(plan, found) or path.name for path, plan in plans.items()}
    if found == MODEL and len(set(labels.values())) < len(labels):  # checkpoints whose folders have the same name
        labels = {path: path.name for path in labels}
    folders = {label: path for path, label in sorted(labels.items(), key=lambda pair: _place(pair[1]))}
    if len(folders) < len(labels):
        return None  # they differ in more than one thing
    return Parts(found, folders, {label: load_records(path) for label, path in folders.items() if path in begun})


def _models(plan: dict[str, Any]) -> list[str]:
    return sorted({str(one.get(MODEL)) for one in plan["configurations"].values()})


def _label(plan: dict[str, Any], axis: str) -> str:
    """What a part is called by its plan."""
    if axis == MODEL:
        return listed(sorted({Path(model).name for model in _models(plan)}))
    work = plan["workload"]
    return label_of(rate_of(work) if axis == RATE else work.get(axis))


def _place(label: str) -> tuple[Any, ...]:
    """Sorts labels: known words in their order, and numbers in names by their value."""
    words = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", label)]
    return _ORDER.index(label) if label in _ORDER else len(_ORDER), words


def write_parts(folder: Path, output: Path | None = None, axis: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """Write `summary.csv`, `summary.md` and, where something was drafted, `acceptance.csv` and, of lengths,
    plots by context into `output` (by default `folder`); return the Markdown and the rows as JSON values. Empty
    where no point is finished."""
    parts = load_parts(folder, axis)
    if parts is None:
        return "", []
    files, rows = part_files(parts)
    for name, content in files.items():
        path = (output or folder) / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    return files["summary.md"], rows


def part_files(parts: Parts) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Content by name, and the rows of summary.csv."""
    import pandas as pd

    from specbatch.sweeps.report.context_plot import context_plot

    rows = {label: table(records) for label, records in parts.records.items()}
    for label, records in parts.records.items():
        speedups = speedups_of(records)
        points = zip(rows[label].concurrency, rows[label].configuration, strict=True)
        rows[label]["ratio_detectable"] = [
            speedups[point].detectable if point in speedups else None for point in points
        ]
    every = pd.concat([own.assign(**{parts.axis: label}) for label, own in rows.items()])
    every.insert(0, parts.axis, every.pop(parts.axis))
    changes = list(accept_changes(parts))
    files = {"summary.csv": every.to_csv(index=False), "summary.md": markdown(parts, rows, changes)}
    if changes:
        files["acceptance.csv"] = _csv(parts.axis, changes)
    if parts.axis == "input_len" and changes:
        lengths = {(int(one.label), one.configuration): one.change for one in changes}
        sizes = {int(label): own for label, own in parts.records.items()}
        files["plots/context.svg"] = context_plot(sizes, lengths)
        files["plots/context-brief.svg"] = context_plot(sizes, lengths, brief=True)
    return files, as_json(every)


@dataclass(frozen=True)
class PartAcceptance:
    """The accept length of a configuration in a part, and its change from the first part."""

    label: str
    configuration: str
    concurrency: int
    prompts: int
    change: AcceptChange


def accept_changes(parts: Parts) -> Iterator[PartAcceptance]:
    """Of each configuration that drafted, at the highest concurrency that all parts have of it."""
    drafting: dict[str, dict[str, dict[int, list[RunRecord]]]] = {}
    for label, records in parts.records.items():
        for (concurrency, name), repeats in points_of(records).items():
            if any(record.drafts for record in repeats):
                drafting.setdefault(name, {}).setdefault(label, {})[concurrency] = repeats
    for name, found in drafting.items():
        common = set.intersection(*(set(own) for own in found.values()))
        if not common:
            continue
        concurrency, base = max(common), list[RunRecord]()
        for label, own in found.items():
            repeats = own[concurrency]
            change = accept_change(base, repeats)
            yield PartAcceptance(label, name, concurrency, max(one.workload["prompts"] for one in repeats), change)
            base = base or repeats


def markdown(parts: Parts, rows: dict[str, Any], changes: list[PartAcceptance]) -> str:
    """Heading, the decision table of all parts, reasoning and answer apart, acceptance, and where speculation pays.
    Ratios are within a part."""
    first, *_ = parts.records.values()
    body: list[dict[str, str]] = []
    failures: list[str] = []
    points: dict[tuple[Any, ...], list[RunRecord]] = {}
    for label, records in parts.records.items():
        headings, cells = decision(rows[label], SWEEP, "concurrency", bases(records))
        least = [share_text(value) for value in rows[label].ratio_detectable]
        for row, power in zip(cells, least, strict=True):
            body.append({parts.title: label, **dict(zip(headings, row, strict=True)), DETECTABLE: power})
        points |= {(label, *point): repeats for point, repeats in points_of(records).items()}
        failures += [
            f"* {replace(note, text=f'{parts.title} {label}: {note.text}')}\n"
            for note in (*failed(records), *left_out(records), *mixed_rounds(records))
        ]
    names = list(dict.fromkeys(name for row in body for name in row))
    if not any(row[DETECTABLE] != "-" for row in body):
        names.remove(DETECTABLE)
    below = ", ".join(f"{parts.folders[label].name}/summary.md" for label in parts.records)
    sections = [
        heading(_about(parts, first)),
        _glance(parts, changes),
        f"{markdown_table([[row.get(name, '-') for name in names] for row in body], names)}\n",
        f"{apart}\n" if (apart := parts_table(points, (parts.title, *POINT))) else "",
        acceptance_markdown(parts, changes),
        f"* {DETECTABLE}: the smallest gain, and below the smallest change, that an interval like that of its row "
        "would have excluded with this probability. A smaller one may be there and not be seen.\n",
        "".join(f"* {note}\n" for note in simulated([one for own in parts.records.values() for one in own])),
        "".join(failures),
        f"* UNFINISHED: {parts.title} {listed(parts.unfinished)}\n" if parts.unfinished else "",
        f"* {below}: all columns and notes\n",
    ]
    return "\n".join(filter(None, sections))


def _glance(parts: Parts, changes: list[PartAcceptance]) -> str:
    """What the long tables below say, with a column for each part, and where speculation pays by length."""
    lengths: dict[tuple[Any, ...], dict[str, str]] = {}
    for one in changes:
        lengths.setdefault((one.concurrency, one.configuration), {})[one.label] = one.change.length_text
    speedups = {label: speedups_of(records) for label, records in parts.records.items()}
    short = across_markdown(parts.title, lengths, speedups)
    pays = pays_markdown(parts) if parts.axis == "input_len" else ""
    power = _power([one.change.detectable for one in changes], speedups) if short else ""
    return "\n".join(filter(None, (short, pays, power, f"{EVERY_POINT}\n" if short or pays else "")))


def _power(changes: list[float | None], speedups: Mapping[str, Mapping[tuple[Any, ...], Speedup]]) -> str:
    """The smallest and the largest detectable effect of the short tables."""
    lengths = [f"{one:.3f}" for one in sorted(one for one in changes if one is not None)]
    gains = sorted(one.detectable for own in speedups.values() for one in own.values() if one.detectable is not None)
    both = (("of accept lengths", lengths), ("of speedups", [share_text(one) for one in gains]))
    texts = [f"{what} {found[0]} to {found[-1]}" for what, found in both if found]
    return f"{DETECTABLE} in these tables: changes {' and '.join(texts)}.\n" if texts else ""


def _about(parts: Parts, first: list[RunRecord]) -> dict[str, str]:
    """The heading of the first part, without what differs."""
    lines, labels = about(first), ", ".join(parts.records)
    work = lines["workload"].replace(", thinking on", "").replace(", thinking off", "")
    if parts.axis == "input_len":
        work = re.sub(r"\d+ input tokens each", f"{labels} input tokens", work)
    if parts.axis == RATE:
        lines |= {"arrivals": "; ".join(dict.fromkeys(about(own)["arrivals"] for own in parts.records.values()))}
    return lines | {"workload": work} | ({MODEL: labels} if parts.axis == MODEL else {})


def acceptance_markdown(parts: Parts, changes: list[PartAcceptance]) -> str:
    """The table of accept lengths; empty where nothing was drafted."""
    if not changes:
        return ""
    interval = f"({CONFIDENCE:.0%} interval)"
    headings = [
        parts.title, "config", "prompts", f"accept length {interval}",
        f"change from {next(iter(parts.records))} {interval}", DETECTABLE,
    ]  # fmt: skip
    body = [
        [one.label, one.configuration, str(one.prompts), one.change.length_text, one.change.change_text,
         one.change.detectable_text]
        for one in changes
    ]  # fmt: skip
    at = ", ".join(str(one) for one in dict.fromkeys(one.concurrency for one in changes))
    note = f"At concurrency {at}; intervals are over prompts (jackknife), those of changes prompt by prompt."
    return f"Accept length and its change by {parts.title}:\n\n{markdown_table(body, headings)}\n\n{note}\n"


def pays_markdown(parts: Parts) -> str:
    """The verdicts of each configuration by length, for net speed and by steps; empty without any."""
    net = {label: speedups_of(records) for label, records in parts.records.items()}
    gains = {label: gains_of(records) for label, records in parts.records.items()}
    steps = {
        label: {place: gain.speedup for place, gain in own.items() if gain and not gain.measures_step}
        for label, own in gains.items()
    }
    places = dict.fromkeys(place for own in net.values() for place in own)
    if not places:
        return ""
    names = list(dict.fromkeys(name for _, name in places))
    body = [
        [place[1], str(place[0]), verdicts_text(net, place), verdicts_text(steps, place)]
        for place in sorted(places, key=lambda place: (names.index(place[1]), place[0]))
    ]
    headings = ["config", "requests in flight", "output tok/s", "by steps"]
    note = (
        "Output tok/s counts everything, prefill of target and draft included; by steps is accept length over "
        "break-even, which is decoding alone."
    )
    return f"Where speculation pays, by {parts.title}:\n\n{markdown_table(body, headings)}\n\n{note}\n"


def verdicts_text(found: dict[str, dict[tuple[Any, ...], Speedup]], place: tuple[Any, ...]) -> str:
    """The verdicts at a point by label: "pays 512-4096, not measured 8192, loses 16384"."""
    if not any(place in own for own in found.values()):
        return "-"
    known = [(label, own[place].verdict if place in own else NOT_MEASURED) for label, own in found.items()]
    texts = []
    for verdict, group in groupby(known, key=lambda pair: pair[1]):
        labels = [label for label, _ in group]
        texts.append(f"{verdict} {labels[0]}{f'-{labels[-1]}' if len(labels) > 1 else ''}")
    return ", ".join(texts)


def _csv(axis: str, changes: list[PartAcceptance]) -> str:
    text = io.StringIO()
    rows = [
        {axis: one.label, "configuration": one.configuration, "concurrency": one.concurrency, "prompts": one.prompts}
        | one.change.as_dict()
        for one in changes
    ]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
