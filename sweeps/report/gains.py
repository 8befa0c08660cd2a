"""Gains of a run over the one before it: a few metrics of each point with before, after, delta and gain in percent.

The table of a change of an engine, as pull requests have it. A number that became worse is named as a regression, and a
change that the repeats do not show has the verdict of `compare`. A p99 is that of the samples there are; a note says
how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from specbatch.jobs.output_files import read_output
from specbatch.records.markdown import markdown_table
from specbatch.records.metrics import METRICS
from specbatch.records.run_totals import least_values
from specbatch.records.runs import PointKey, Replicates, load_run, match
from specbatch.records.verdicts import LOSES, NOT_JUDGED, PAYS, speedup_of
from specbatch.sweeps.report.compare import missing_notes
from specbatch.sweeps.report.heading import made_up

SHOWN = ("output_throughput", "p99_ttft_s", "mean_tpot_s")
FILES = ("gains.md", "gains.csv")


@dataclass(frozen=True)
class Gain:
    """One metric at one point, in the unit of records. old, new: None where it was not measured. samples: of a
    percentile, those of the side with fewer; None: enough. verdict: that of `compare`."""

    section: str
    configuration: str
    concurrency: int | str
    metric: str
    old: float | None
    new: float | None
    samples: int | None
    verdict: str

    @property
    def delta(self) -> float | None:
        return None if self.old is None or self.new is None else self.new - self.old

    @property
    def gain(self) -> float | None:
        """The change as a share of what it was before; None where that was 0."""
        return self.delta / self.old if self.delta is not None and self.old else None

    @property
    def is_regression(self) -> bool:
        delta = self.delta or 0.0
        return delta < 0 if METRICS[self.metric].better == "higher" else delta > 0

    @property
    def delta_text(self) -> str:
        metric = METRICS[self.metric]
        return "-" if self.delta is None else f"{metric.scale * self.delta:+.{metric.decimals}f}"

    @property
    def share_text(self) -> str:
        return "-" if self.gain is None else f"{self.gain:+.1%}"

    @property
    def gain_text(self) -> str:
        """With what was not shown by the repeats."""
        words = ["regression"] if self.is_regression else []
        if self.delta and self.verdict not in (PAYS, LOSES):
            words.append(self.verdict)
        return f"{self.share_text} ({', '.join(words)})" if words else self.share_text

    @property
    def where(self) -> str:
        return str(PointKey(self.section, self.configuration, self.concurrency)) or "the run"


@dataclass(frozen=True)
class Gains:
    """Gains of `after` over `before`, by their labels. unreal: what was not real in them. missing: notes on points that
    are not in the table."""

    before: str
    after: str
    unreal: str
    rows: list[Gain]
    missing: list[str]

    def markdown(self) -> str:
        title = f"### Gain of {self.after} over {self.before}{f' ({self.unreal})' if self.unreal else ''}"
        named = [name for name in ("section", "configuration") if any(getattr(row, name) for row in self.rows)]
        body: list[list[str]] = []
        last: list[str] = []
        for row in self.rows:
            metric = METRICS[row.metric]
            values = [metric.text(row.old), metric.text(row.new)]
            place = [*(getattr(row, name) for name in named), str(row.concurrency)]
            shown = [""] * len(place) if place == last else place
            body.append([*shown, metric.heading, *values, row.delta_text, row.gain_text])
            last = place
        headings = [*named, "concurrency", "metric", "before", "after", "delta", "gain"]
        lines = [f"* before: {self.before}", f"* after: {self.after}", *self._notes()]
        return "\n".join([title, "", markdown_table(body, headings), "", *lines, ""])

    def _notes(self) -> Iterator[str]:
        worse = [row for row in self.rows if row.is_regression]
        named = ", ".join(f"{METRICS[row.metric].title} at {row.where} ({row.share_text})" for row in worse)
        yield f"* regressions: {named or 'none'}"
        for row in self.rows:
            if row.samples is not None:
                metric = METRICS[row.metric]
                needed = least_values(metric.percentile or 50)
                yield f"* FEW SAMPLES: {metric.title} at {row.where} is of {row.samples}; it needs {needed}"
        yield from (f"* {note}" for note in self.missing)


@dataclass(frozen=True)
class AllGains:
    """Of each run over the first one."""

    each: list[Gains]

    def markdown(self) -> str:
        return "\n".join(one.markdown() for one in self.each)

    def csv(self) -> str:
        import pandas as pd

        return str(pd.DataFrame(self.as_dict()).to_csv(index=False))

    def as_dict(self) -> list[dict[str, object]]:
        """The rows of all, ready for JSON."""
        return [
            {"before": one.before, "after": one.after, **asdict(row), "delta": row.delta, "gain": row.gain}
            for one in self.each
            for row in one.rows
        ]


def gains_of(paths: Mapping[str, Path]) -> AllGains:
    """Of runs by label, the first of which is the one before. Refused: what `compare` refuses."""
    (label, base), *others = paths.items()
    before = load_run("base", base, read_output)
    found = []
    for name, path in others:
        run = load_run("run", path, read_output)
        pairs = match(before, run)
        rows = [row for place, both in pairs.both.items() for row in _rows(place, *both)]
        records = [record for both in pairs.both.values() for point in both for record in point.records]
        found.append(Gains(label, name, made_up(records), rows, missing_notes(before, run, pairs)))
    return AllGains(found)


def _rows(place: PointKey, before: Replicates, after: Replicates) -> Iterator[Gain]:
    if before.error or after.error:
        return
    for key in SHOWN:
        metric, samples = METRICS[key], None
        old, new = (metric.over_repeats(point.records) for point in (before, after))
        if metric.percentile is not None and None in (old, new):
            (old, count), (new, other) = (metric.of_all(point.records) for point in (before, after))
            samples = min(count, other)
        speedup = None if samples is not None else speedup_of(metric, before, after)
        yield Gain(*place, key, old, new, samples, speedup.verdict if speedup else NOT_JUDGED)
