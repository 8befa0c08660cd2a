"""`specbatch compare BASE RUN ...`: every metric of runs relative to the first one, with an interval and a verdict.

* A ratio is run / base, and a change run - base; shares and scores are compared by their change. The verdict is that of
  `specbatch.records.verdicts`, as for `sweep`: "pays", "loses", "undecided", "one repeat", "not interleaved" for times
  of runs of which the repeats of one side came first, or "not judged" without an interval.
  Each number is the mean over the repeats that both measured.
* Answers of `generate` are paired by prompt. A job that was interrupted and resumed is judged by the metrics that
  follow from its prompts, not by its times.
* Of another engine, in files of lm-eval, there are answers alone.
* Intervals: see `specbatch.records.intervals`; of accuracy, see `specbatch.records.mcnemar`.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specbatch.errors import SpecbatchError
from specbatch.jobs.output_files import read_output
from specbatch.records.answers import EvalAnswers
from specbatch.records.archive import unpacked
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.intervals import Interval, in_common, interval
from specbatch.records.markdown import markdown_table
from specbatch.records.mcnemar import changes, is_binary
from specbatch.records.metric import Better, Metric
from specbatch.records.metrics import METRICS, keys_by_place
from specbatch.records.runs import Pairs, PointKey, Replicates, Run, answers_of, differences, load_run, match
from specbatch.records.verdicts import NOT_INTERLEAVED, NOT_JUDGED, ONE_REPEAT, Speedup, speedup_of, verdict_of
from specbatch.sweeps.report.point_notes import replay_note, unused_graphs
from specbatch.sweeps.report.sentences import conclusion

COMPARED = keys_by_place("compare")
SPEED = "output_throughput"
_NO_RATIO: tuple[float | None, float | None, float | None] = (None, None, None)
SHOWN = 10  # answers that are not the same


@dataclass(frozen=True)
class Row:
    """One metric of a run at one point, in the unit of records. None: not measured, or without an interval.

    run         the label of the run that is compared with the base
    low, high   the interval of the change
    ratio       of the run and the base, with its interval, as `sweep` has it; None for shares and scores. The verdict
                follows from the interval of the ratio, else from that of the change
    repeats     of the side with fewer
    shown       how tables show it
    """

    run: str
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
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    over: str
    verdict: str
    repeats: int
    shown: Metric

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON and CSV."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "shown"}

    @property
    def place(self) -> PointKey:
        return PointKey(self.section, self.configuration, self.size)

    @property
    def speedup(self) -> Speedup | None:
        """The ratio, as `sweep` shows it; None for shares and scores, and where it is not known."""
        if self.ratio is None:
            return None
        return Speedup(self.ratio, self.ratio_low, self.ratio_high, self.verdict, self.repeats)

    @property
    def cell(self) -> str:
        """Ratio or change with its interval, and the verdict."""
        if self.change is None:
            return "-"
        if (speedup := self.speedup) is not None:
            return f"{speedup} {self.verdict}" if speedup.interval_text != self.verdict else str(speedup)

        def signed(value: float) -> str:
            return f"{self.shown.scale * value:+.{self.shown.decimals}f}"

        if self.low is None or self.high is None:
            return f"{signed(self.change)} ({self.verdict})"
        return f"{signed(self.change)} ({signed(self.low)} to {signed(self.high)}) {self.verdict}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    base     the label of the first run; paths: of all runs, by label
    differs  by label of another run: settings, caps, versions and hardware that are not those of the base
    """

    base: str
    paths: dict[str, Path]
    model: str
    differs: dict[str, dict[str, list[str]]]
    rows: list[Row]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "base": self.base,
            "runs": {label: str(path) for label, path in self.paths.items()},
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

    def sentences(self) -> list[str]:
        """How much faster the runs are than the base, in the words of `sweep`."""
        found = {}
        for row in self.rows:
            if row.metric == SPEED and row.size != "" and row.speedup is not None:
                name = " ".join(filter(None, (row.section, row.configuration)))
                found[row.size, f"{row.run} ({name})" if name else row.run] = row.speedup
        return conclusion(found, {name: self.base for _, name in found})

    def markdown(self) -> str:
        others = [label for label in self.paths if label != self.base]
        places = [name for name in PointKey._fields if any(getattr(row, name) for row in self.rows)]
        titles = ["concurrency" if name == "size" else name for name in places]
        lines: dict[tuple[PointKey, str], dict[str, Row]] = {}
        for row in self.rows:
            lines.setdefault((row.place, row.metric), {})[row.run] = row
        body = []
        for (place, _), found in lines.items():
            if all(row.change is None for row in found.values()):
                continue  # only one side has it; the CSV shows it
            first = next(iter(found.values()))
            values = [first.shown.text(first.before)]
            values += [found[label].shown.text(found[label].after) if label in found else "-" for label in others]
            cells = [found[label].cell if label in found else "-" for label in others]
            body.append([*(getattr(place, name) for name in places), first.shown.heading, *cells, *values])
        headers = [*titles, "metric", *(f"{label} / {self.base}" for label in others), self.base, *others]
        about = [f"{label}: {path}" for label, path in self.paths.items()] + [f"model: {self.model}"]
        about += [
            f"differs{f' ({label})' if len(others) > 1 else ''}: {name}: {'; '.join(texts)}"
            for label, found in self.differs.items()
            for name, texts in found.items()
        ]
        listed = "".join(f"* {line}\n" for line in (*about, *self.notes))
        sentences = "".join(f"{sentence}\n" for sentence in self.sentences())
        return "\n".join(filter(None, (sentences, f"{markdown_table(body, headers)}\n", listed)))


def compare(base: Path, *runs: Path) -> Comparison:
    """Compare each of `runs` with `base`. Refused: runs of different models or workloads."""
    every = [load_run("base" if path is base else "run", path, read_output) for path in (base, *runs)]
    labels = _labels([run.path for run in every])
    old, *others = every
    rows: list[Row] = []
    notes: dict[str, None] = {}
    differs = {}
    with unpacked("base", old.path) as old_files:
        for new, label in zip(others, labels[1:], strict=True):
            with unpacked("run", new.path) as new_files:
                found, lines, settings = _pair(old, new, label, (old_files, new_files))
            rows += found
            notes |= dict.fromkeys(lines)
            differs[label] = settings
    if not rows:
        names = " and ".join(str(run.path) for run in every)
        reason = "every point of one of them failed, its answers were not scored, or it is a group without an own score"
        raise SpecbatchError(f"{names} have no metric in common: {reason}")
    order = {place: at for at, place in enumerate(dict.fromkeys(row.place for row in rows))}
    rows.sort(key=lambda row: order[row.place])
    paths = dict(zip(labels, (run.path for run in every), strict=True))
    return Comparison(labels[0], paths, _model(old), differs, rows, [*notes, *reading_notes(rows, differs)])


def _labels(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or more of it where the last ones are the same; the whole path, numbered, if need
    be."""
    for count in (1, 2, 3):
        labels = ["/".join(path.parts[-count:]) or str(path) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]


def _pair(
    old: Run, new: Run, label: str, files: tuple[Path, Path]
) -> tuple[list[Row], list[str], dict[str, list[str]]]:
    """Rows, notes and settings that differ, of a run and the base. files: where their files are, of archives the
    unpacked ones."""
    pairs = match(old, new)
    others = [run for run in (old, new) if run.other_engine]
    notes = [
        f"ANSWERS ONLY: {run.path} ({run.other_engine}): lm-eval's files have no times and no accept lengths"
        for run in others
    ] + missing_notes(old, new, pairs)
    rows: list[Row] = []
    for place, points in pairs.both.items():
        for path, point in zip((old.path, new.path), points, strict=True):
            where = f"{path} {place}".rstrip()
            notes += [] if point.error or point.records[0].other_engine else list(_notes(point, where))
        notes += _same_tokens(*points)
        if not any(point.error for point in points):
            if all(len(point.paths) == 1 for point in points):
                places = zip(("base", "run"), files, (old, new), points, strict=True)
                answers = (answers_of(setting, run.path, point, found) for setting, found, run, point in places)
                rows += _answers(label, place, *answers)
            if not others:
                rows += _numbers(label, place, *points)
    return rows, notes, _settings(pairs)


def missing_notes(old: Run, new: Run, pairs: Pairs) -> list[str]:
    """Notes on points and repeats that a comparison lacks: of one run only, interrupted, failed."""
    notes = [
        f"ONLY IN {path}: {place}"
        for path, places in ((old.path, pairs.only_before), (new.path, pairs.only_after))
        for place in places
    ]
    notes += [
        f"UNFINISHED: {run.path} {place}: its sweep was interrupted and lacks {count} of its repeats"
        for run in (old, new)
        for place, count in run.missing.items()
    ]
    for place, points in pairs.both.items():
        for path, point in zip((old.path, new.path), points, strict=True):
            notes += _failures(point, f"{path} {place}".rstrip())
    return notes


def _settings(pairs: Pairs) -> dict[str, list[str]]:
    """What differs; of a server or another engine and this one not the settings that only this one has."""
    found = differences(pairs)
    engines = [point.records[0].other_engine for points in pairs.both.values() for point in points]
    if any(engines):
        names = ["model", "lm_eval version", *(("engine",) if all(engines) else ())]
        names += [name for name in found if all(engines) and name.startswith("model_args.")]
        return {name: texts for name, texts in found.items() if name in names}
    servers = {["server" in point.records[0].config for point in points].count(True) for points in pairs.both.values()}
    if 1 not in servers:
        return found
    shown = ("model", "server", "speculation.")
    return {name: texts for name, texts in found.items() if name in shown[:2] or name.startswith(shown[2])}


def _numbers(label: str, place: PointKey, before: Replicates, after: Replicates) -> Iterator[Row]:
    for metric in (METRICS[key] for key in COMPARED):
        old, new = (point.mean(metric.key) for point in in_common(before, after))
        if metric.better is None or (old is None and new is None):
            continue
        found, speedup = interval(metric, before, after), None
        if metric.unit != "%":
            speedup = speedup_of(metric, before, after, found)
        repeats = min(len(before.records), len(after.records))
        yield _row(label, place, metric, (old, new), found, repeats, speedup)


def _answers(label: str, place: PointKey, old: EvalAnswers | None, new: EvalAnswers | None) -> Iterator[Row]:
    """Accuracy by question under every filter, and the share of truncated answers, of one run per side."""
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
        shown = {"unit": "%", "decimals": 2} if score.better == "higher" else {"unit": "", "decimals": 4}
        metric = _answer_metric(" ".join(pair), score.better, **shown)
        speedup = None
        if score.better == "lower" and score.value:
            speedup = Speedup(values[pair] / score.value, None, None, verdict_of(found, score.better), 1)
        yield _row(label, place, metric, (score.value, values[pair]), found, speedup=speedup)
    if all(answers.generates and not answers.record.other_engine for answers in (old, new)):
        plain = Interval(None, None, "shares of the answers")
        metric = _answer_metric("truncated answers", "lower", unit="%")
        yield _row(label, place, metric, (old.truncated, new.truncated), plain)


def _answer_metric(name: str, better: Better, **shown: Any) -> Metric:
    """A number of the answers, which the registry does not have."""
    return Metric(name, name, definition="", formula="", better=better, **shown)


def _row(
    label: str,
    place: PointKey,
    metric: Metric,
    values: tuple[float | None, float | None],
    found: Interval,
    repeats: int = 1,
    speedup: Speedup | None = None,
) -> Row:
    before, after = values
    change = None if before is None or after is None else after - before
    low, high = (None if change is None else end for end in (found.low, found.high))
    assert metric.better is not None
    verdict = NOT_JUDGED if change is None else speedup.verdict if speedup else verdict_of(found, metric.better)
    relative = change / before if change is not None and before else None
    numbers = (before, after, change, relative, low, high)
    ratios = (speedup.ratio, speedup.low, speedup.high) if speedup else _NO_RATIO
    return Row(label, *place, metric.key, metric.better, *numbers, *ratios, found.over, verdict, repeats, metric)


def _failures(point: Replicates, where: str) -> Iterator[str]:
    """Repeats that are in no number."""
    for reason, count in Counter(point.failures).items():
        total = len(point.failures) + (0 if point.error else len(point.records))
        yield f"FAILED: {where}: {f'{count} of {total} repeats: ' if total > 1 else ''}{reason}"


def _notes(point: Replicates, where: str) -> Iterator[str]:
    for record in point.records:
        yield from (str(replay_note(graphs, where)) for graphs in unused_graphs(record))
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


def reading_notes(rows: list[Row], differs: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    """Notes on how to read the table."""
    if any("hardware" in found for found in differs.values()):
        yield "DIFFERENT HARDWARE: times and throughput depend on the machines as much as on the runs."
    by_basis: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.change is not None:
            basis = f"no interval ({row.over})" if row.low is None else f"{CONFIDENCE:.0%} intervals over {row.over}"
            by_basis.setdefault(basis, {})[row.shown.title] = None
    for basis, titles in by_basis.items():
        yield f"{basis}: {', '.join(titles)}."
    if any(row.verdict in (ONE_REPEAT, NOT_INTERLEAVED) for row in rows):
        yield (
            "NOT INTERLEAVED: times of single runs, or of all runs of one side after the other's, also differ by what "
            "the machine did meanwhile. sweep --repeats 3 interleaves its configurations; to compare two versions, run "
            "them alternately into A/1 B/1 B/2 A/2 and compare A with B."
        )
    judged = [row for row in rows if row.low is not None]
    chance = math.floor(len(judged) * (1 - CONFIDENCE) + 0.5)
    if chance:
        many = f"{len(judged)} intervals at {CONFIDENCE:.0%}"
        of_ratios = sum(row.ratio is not None for row in judged)
        none = "zero" if not of_ratios else "1" if of_ratios == len(judged) else "1 (those of differences: zero)"
        yield f"Of {many}, about {chance} would exclude {none} by chance if nothing differed."


def _model(run: Run) -> str:
    config = next(iter(run.points.values())).records[0].config
    origin = "" if config["load_format"] == "auto" else f" ({config['load_format']})"
    return f"{config['model']}{origin}"
