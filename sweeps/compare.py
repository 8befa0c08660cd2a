"""`specbatch compare BEFORE AFTER`: the difference of every metric between two runs, with an interval and a verdict.

* The change is after - before; the relative change is change / before. The verdict is "regression" if the interval of
  the change excludes zero on the worse side, "no difference shown" if it contains zero, "not
  judged" if there is no interval. Times of runs that were not interleaved (one run per side, or all of one side first)
  are "better" or "worse, not interleaved". Each number is the mean over repeats.
* Answers of `generate` are paired by prompt. A job that was interrupted and resumed is judged by the metrics that
  follow from its prompts, not by its times.
* Intervals: see `specbatch.records.intervals`; of accuracy, see `specbatch.records.mcnemar`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specbatch.errors import SpecbatchError
from specbatch.jobs.output_files import read_output
from specbatch.records.answers import load_answers
from specbatch.records.intervals import CONFIDENCE, Interval, interval
from specbatch.records.markdown import markdown_table
from specbatch.records.mcnemar import changes, is_binary
from specbatch.records.metrics import METRICS, Better, Metric
from specbatch.records.runs import PointKey, Replicates, Run, differences, load_run, match
from specbatch.sweeps.report.notes import replay_notes

COMPARED = (
    *("output_throughput", "accept_length", "accept_rate", "mean_ttft_s", "median_ttft_s", "p99_ttft_s"),
    *("mean_tpot_s", "median_tpot_s", "p99_tpot_s", "mean_e2e_s", "p99_e2e_s", "step_s", "step_time_s"),
    *("goodput", "slo_share"),
    *("device_idle_share", "host_waits_per_step", "graph_coverage"),
)
BETTER, WORSE, SAME, UNJUDGED = "better", "regression", "no difference shown", "not judged"
SHOWN = 10  # answers that are not the same
NOT_INTERLEAVED = {BETTER: "better, not interleaved", WORSE: "worse, not interleaved", SAME: SAME}


@dataclass(frozen=True)
class Row:
    """One metric at one point, in the unit of records. None: not measured, or without an interval.

    shown   how tables show it
    """

    section: str
    configuration: str
    size: int | str
    metric: str
    better: Better
    before: float | None
    after: float | None
    change: float | None
    relative_change: float | None
    low: float | None
    high: float | None
    over: str
    verdict: str
    shown: Metric

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON and CSV."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "shown"}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. differs: settings, caps, versions and hardware that are not the same."""

    before: Path
    after: Path
    model: str
    differs: dict[str, list[str]]
    rows: list[Row]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "before": str(self.before),
            "after": str(self.after),
            "model": self.model,
            "confidence": CONFIDENCE,
            "differs": self.differs,
            "rows": [row.as_dict() for row in self.rows],
            "notes": self.notes,
        }

    def csv(self) -> str:
        """One line per row, with unrounded numbers."""
        names = [item.name for item in fields(Row) if item.name != "shown"]
        text = io.StringIO()
        table = csv.DictWriter(text, names, lineterminator="\n")
        table.writeheader()
        table.writerows(row.as_dict() for row in self.rows)
        return text.getvalue()

    def markdown(self) -> str:
        places = [name for name in ("section", "configuration", "size") if any(getattr(row, name) for row in self.rows)]
        titles = ["concurrency" if name == "size" else name for name in places]
        body = [[*(getattr(row, name) for name in places), *_cells(row)] for row in self.rows]
        interval = f"{CONFIDENCE:.0%} interval of change"
        headers = [*titles, "metric", "before", "after", "change", "relative change", interval, "interval over"]
        shown = markdown_table(body, headers)
        lines = [f"before: {self.before}", f"after: {self.after}", f"model: {self.model}"]
        lines += [f"differs: {name}: {'; '.join(texts)}" for name, texts in self.differs.items()]
        return "\n".join([*(f"* {line}" for line in lines), "", shown, "", *(f"* {note}" for note in self.notes), ""])


def compare(before: Path, after: Path) -> Comparison:
    """Compare run `after` with run `before`. Refused: runs of different models or workloads."""
    old, new = load_run("before", before, read_output), load_run("after", after, read_output)
    pairs = match(old, new)
    notes = [
        f"ONLY IN {path}: {place}"
        for path, places in ((before, pairs.only_before), (after, pairs.only_after))
        for place in places
    ]
    notes += [
        f"UNFINISHED: {run.path} {place}: its sweep was interrupted and lacks {count} of its repeats"
        for run in (old, new)
        for place, count in run.missing.items()
    ]
    rows: list[Row] = []
    for place, points in pairs.both.items():
        for path, point in zip((before, after), points, strict=True):
            where = f"{path} {place}".rstrip()
            notes += [f"FAILED: {where}: {point.error}"] if point.error else list(_notes(point, where))
        notes += _same_tokens(*points)
        if not any(point.error for point in points):
            rows += [*_answers(place, *points), *_numbers(place, *points)]
    if not rows:
        raise SpecbatchError(f"{before} and {after} have no metric in common: every point of one of them failed")
    differs = differences(pairs)
    return Comparison(before, after, _model(old), differs, rows, [*notes, *_reading(rows, differs)])


def _numbers(place: PointKey, before: Replicates, after: Replicates) -> Iterator[Row]:
    for metric in (METRICS[key] for key in COMPARED):
        old, new = before.mean(metric.key), after.mean(metric.key)
        if metric.better is None or (old is None and new is None):
            continue
        found = interval(metric, before, after)
        yield _row(place, metric, (old, new), found)


def _answers(place: PointKey, before: Replicates, after: Replicates) -> Iterator[Row]:
    """Accuracy by question under every filter, and the share of truncated answers. Needs one run per side."""
    if len(before.paths) > 1 or len(after.paths) > 1:
        return
    old, new = (load_answers("run", point.paths[0]) for point in (before, after))
    if old is None or new is None:
        return
    values = {(score.filter, score.metric): score.value for score in new.overall}
    for score in old.overall:
        pair = score.filter, score.metric
        if pair not in values:
            continue
        found = Interval(None, None, "not right or wrong")
        if is_binary(old, *pair) and is_binary(new, *pair):
            changed = changes(old, new, *pair)
            counts = f"{len(changed.lost)} lost, {len(changed.gained)} gained, p = {changed.p_changed():.3g}"
            found = Interval(*changed.interval(CONFIDENCE), f"{changed.n} questions, paired: {counts}")
        # A metric where lower is better, such as perplexity, is not a share.
        shown = (
            {"unit": "%", "scale": 100.0, "decimals": 2} if score.better == "higher" else {"unit": "", "decimals": 4}
        )
        metric = _answer_metric(" ".join(pair), score.better, **shown)
        yield _row(place, metric, (score.value, values[pair]), found)
    if old.generates:
        plain = Interval(None, None, "shares of the answers")
        metric = _answer_metric("truncated answers", "lower", unit="%", scale=100.0)
        yield _row(place, metric, (old.truncated, new.truncated), plain)


def _answer_metric(name: str, better: Better, **shown: Any) -> Metric:
    """A number of the answers, which the registry does not have."""
    return Metric(name, name, definition="", formula="", better=better, **shown)


def _row(place: PointKey, metric: Metric, values: tuple[float | None, float | None], found: Interval) -> Row:
    before, after = values
    change = None if before is None or after is None else after - before
    low, high = (None if change is None else end for end in (found.low, found.high))
    assert metric.better is not None
    verdict = UNJUDGED
    if low is not None and high is not None:
        verdict = SAME if low <= 0 <= high else BETTER if (low > 0) == (metric.better == "higher") else WORSE
        verdict = verdict if found.interleaved else NOT_INTERLEAVED[verdict]
    relative = change / before if change is not None and before else None
    numbers = (before, after, change, relative, low, high)
    return Row(*place, metric.key, metric.better, *numbers, found.over, verdict, metric)


def _cells(row: Row) -> list[str]:
    metric, relative = row.shown, "-" if row.relative_change is None else f"{row.relative_change:+.1%}"

    def signed(value: float) -> str:
        return f"{metric.scale * value:+.{metric.decimals}f}"

    return [
        metric.heading,
        *(metric.text(value) for value in (row.before, row.after)),
        "-" if row.change is None else signed(row.change),
        relative if row.verdict == BETTER else f"{relative} ({row.verdict})",
        "-" if row.low is None or row.high is None else f"{signed(row.low)} to {signed(row.high)}",
        row.over,
    ]


def _notes(point: Replicates, where: str) -> Iterator[str]:
    for record in point.records:
        yield from map(str, replay_notes(record, where))
        wanted = record.workload.get("requests") or record.workload.get("prompts", len(record.requests))
        if isinstance(wanted, int) and (done := record.metrics.get("requests") or 0) < wanted:
            yield f"INCOMPLETE: {where}: {done:g} of {wanted} prompts finished"
    if point.resumed:
        yield f"RESUMED: {where}: {point.resumed}"


def _same_tokens(before: Replicates, after: Replicates) -> Iterator[str]:
    """How many answers have the same tokens, of the prompts that both sides answered. Only `generate` keeps tokens."""
    old, new = (
        {row["index"]: list(row["token_ids"]) for row in point.records[0].requests if row.get("token_ids") is not None}
        for point in (before, after)
    )
    both = [index for index in old if index in new]
    if both:
        others = [index for index in both if old[index] != new[index]]
        listed = ", ".join(map(str, others[:SHOWN])) + (" ..." if len(others) > SHOWN else "")
        named = f"; others by index: {listed}" if others else ""
        yield f"ANSWERS: {len(both) - len(others)} of {len(both)} have the same tokens{named}"


def _reading(rows: list[Row], differs: dict[str, list[str]]) -> Iterator[str]:
    """Notes on how to read the table."""
    if "hardware" in differs:
        yield "DIFFERENT HARDWARE: times and throughput depend on the machines as much as on the runs."
    judged = [row for row in rows if row.verdict != UNJUDGED]
    if any(row.verdict in (NOT_INTERLEAVED[BETTER], NOT_INTERLEAVED[WORSE]) for row in rows):
        yield (
            "NOT INTERLEAVED: times of single runs, or of all runs of one side after the other's, also differ by what "
            "the machine did meanwhile. sweep --repeats 3 interleaves its configurations; to compare two versions, run "
            "them alternately into A/1 B/1 A/2 B/2 and compare A with B."
        )
    chance = math.floor(len(judged) * (1 - CONFIDENCE) + 0.5)
    if chance:
        many = f"{len(judged)} intervals at {CONFIDENCE:.0%}"
        yield f"Of {many}, about {chance} would exclude zero by chance if nothing differed."


def _model(run: Run) -> str:
    config = next(iter(run.points.values())).records[0].config
    origin = "" if config["load_format"] == "auto" else f" ({config['load_format']})"
    return f"{config['model']}{origin}"
