"""Table of an evaluation in several configurations: accuracy and speed of each point beside its baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from specbatch.config.engine_config import Graphs
from specbatch.errors import counted
from specbatch.evals.report import EvalReport
from specbatch.files.atomic_file import write_atomic, write_json
from specbatch.files.text_files import read_json
from specbatch.records.answers import Score
from specbatch.records.bases import bases_of
from specbatch.records.markdown import markdown_table
from specbatch.records.mcnemar import changes, is_binary
from specbatch.records.metrics import METRICS
from specbatch.records.reasoning import parts_of, parts_table, reasons
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import Replicates
from specbatch.records.store import RECORD
from specbatch.records.sweep_plan import LEFT_OUT, PLAN, Described, folder_name
from specbatch.records.verdicts import ONE_REPEAT, speedup_of
from specbatch.sweeps.report.point_notes import mixed_rounds, server_notes

SUMMARY = ("summary.md", "summary.csv", "summary.json")
SHOWN = ("accept_length", "mean_ttft_s", "mean_tpot_s", "output_throughput")
Place = tuple[int, str]  # concurrency, configuration


@dataclass(frozen=True)
class Grid:
    """The reports of each point that was measured, one per repeat.

    bases      by configuration: the one that it is compared with
    left_out   why a configuration, or one of its points, was not measured
    repeats    as many as were asked for
    """

    reports: dict[Place, list[EvalReport]]
    bases: dict[str, str]
    left_out: dict[str, str]
    repeats: int = 1

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of each point, by name. Scores and answers are those of the first repeat."""
        return [{"concurrency": place[0], "configuration": place[1], **self._row(place)} for place in self.reports]

    def table(self) -> str:
        """Markdown: accuracy and speed of each point, and below it the other scores."""
        lines = []
        if self.reports:
            rows = self.rows()
            lines = [
                markdown_table(self.cells()),
                markdown_table(map(self._details, rows)),
                parts_table(self.records(), ("concurrency", "configuration")),
                self._notes(rows),
            ]
        names: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names.setdefault(reason, []).append(name)
        lines += [f"{', '.join(alike)}: left out, {reason}" for reason, alike in names.items()]
        return "\n\n".join(filter(None, lines))

    def cells(self) -> list[dict[str, str]]:
        """The rows of the first table."""
        rows = self.rows()
        return [self._cells(row, judged=any("speedup_text" in row for row in rows)) for row in rows]

    def records(self) -> dict[Place, list[RunRecord]]:
        """The records of each point."""
        return {place: [one.record for one in found] for place, found in self.reports.items()}

    def scores(self) -> list[dict[str, str]]:
        """The cells of each point by their heading: scores, their difference from the base, and what they are of."""
        found = []
        for row in self.rows():
            cells = self._details(row)
            cells["difference"] = _difference_text(row) if "difference" in row else "-"
            found.append(cells)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "rows": self.rows(),
            "configurations": {
                f"{name} at concurrency {concurrency}": reports[0].as_dict()
                for (concurrency, name), reports in self.reports.items()
            },
            "left_out": self.left_out,
        }

    def save(self, folder: Path, names: Sequence[str] = SUMMARY) -> None:
        """Write the table as Markdown, CSV and JSON, with these names."""
        import pandas

        table, rows, every = (folder / name for name in names)
        write_atomic(table, self.table() + "\n")
        write_atomic(rows, pandas.DataFrame(self.rows()).to_csv(index=False))
        write_json(every, self.as_dict())

    def _row(self, place: Place) -> dict[str, Any]:
        concurrency, name = place
        report, *_ = reports = self.reports[place]
        row: dict[str, Any] = {
            "questions": len(report.questions),
            "repeats": len(reports),
            "base": self.bases[name],
            "truncated": report.truncated,
        }
        for score in report.overall:
            known = {"": score.value, " stderr": score.stderr, " unparsed": score.unparsed}
            row |= {f"{_named(score, report)}{what}": value for what, value in known.items() if value is not None}
        row |= {key: _mean([one.record.metrics.get(key) for one in reports]) for key in SHOWN}
        if any(reasons([one.record for one in found]) for found in self.reports.values()):
            row |= parts_of([one.record for one in reports])
        base = self.reports.get((concurrency, self.bases[name]))
        if base is None or base is reports:
            return row
        return row | _paired(base[0], report) | _speedup(base, reports)

    def _cells(self, row: dict[str, Any], *, judged: bool) -> dict[str, str]:
        report = self.reports[row["concurrency"], row["configuration"]][0]
        cells = {"concurrency": str(row["concurrency"]), "configuration": row["configuration"]}
        cells["speedup"] = row.get("speedup_text", "-")
        cells[_named(report.overall[0], report)] = _score_text(report.overall[0])
        cells["difference"] = _difference_text(row) if "difference" in row else "-"
        cells |= {
            METRICS[key].heading.removeprefix("mean ").removeprefix("output "): METRICS[key].text(row[key])
            for key in SHOWN
        }
        if not report.record.drafts and not report.record.of_server:
            cells[METRICS["accept_length"].heading] = "-"
        return cells | ({"verdict": row.get("verdict", "-")} if judged else {})

    def _details(self, row: dict[str, Any]) -> dict[str, str]:
        report = self.reports[row["concurrency"], row["configuration"]][0]
        cells = {"concurrency": str(row["concurrency"]), "configuration": row["configuration"]}
        cells["questions"] = str(row["questions"])
        if self.repeats > 1:
            known = row["repeats"]
            cells["repeats"] = f"{known} of {self.repeats}" if known < self.repeats else str(known)
        for score in report.overall:
            missed = "" if score.unparsed is None else f", {score.unparsed:.1%} unparsed"
            cells[_named(score, report)] = _score_text(score) + missed
        same = f"{row['same_answers']} of {row['questions']}" if "same_answers" in row else "-"
        return cells | {"truncated": f"{report.truncated:.1%}", "same answers": same}

    def _notes(self, rows: list[dict[str, Any]]) -> str:
        first = next(iter(self.reports.values()))[0]
        bases: dict[str, list[str]] = {}
        for name, base in self.bases.items():
            if name != base and any(row["configuration"] == name for row in rows):
                bases.setdefault(base, []).append(name)
        over = "; ".join(f"{', '.join(names)} from {base}" for base, names in bases.items())
        repeats = max(row["repeats"] for row in rows)
        spread = (
            f"geometric mean of {repeats} repeats, with its 95% interval"
            if repeats > 1
            else "one repeat, so no interval"
        )
        records = {name: reports[0].record for (_, name), reports in self.reports.items()}
        engines = {name: one for name, one in records.items() if not one.of_server}
        others = _differing({name: one.config for name, one in engines.items()})
        what = "".join(
            f"* {name}: {one.speculation}; {Graphs(**one.config['graphs'])}{others[name]}\n"
            if name in engines
            else f"* {name}: {_server_text(one)}\n"
            for name, one in records.items()
        )
        shown = next(iter(engines.values()), first.record)
        model = f"{shown.config['model']}, {shown.caps['dtype']} on {shown.processor}"
        model = shown.config["model"] if shown.of_server else model
        alike = "token for token" if len(engines) == len(records) else "token for token, of servers text for text"
        examples = first.examples
        warning = f" Warning: {first.warning}." if first.warning else ""
        every = [one for reports in self.reports.values() for one in reports]
        noted = dict.fromkeys(note for one in every for note in one.notes)
        noted |= dict.fromkeys(str(note) for one in every if one.record.of_server for note in server_notes(one.record))
        noted |= dict.fromkeys(map(str, mixed_rounds([one.record for one in every])))
        warning += "".join(f" Note: {note}." for note in noted)
        ratios = (
            f" Speedup (ratio of output tok/s, {spread}) and difference (of the first score on the same questions, "
            "with the two-sided p value of McNemar's test, or ± standard error where answers are not right or wrong) "
            f"are of {over}."
            if over
            else ""
        )
        return (
            f"Model: {model}. Data: {first.data_source}. Few-shot examples: {examples}.{warning}\n\n{what}\n"
            f"{first.task} (version {first.task_version}, lm-eval {first.lm_eval_version}): {self._counts(rows)} "
            f"({first.sampled}). Scores: "
            f"{first.overall[0].metric} ± standard error.{ratios} TTFT and TPOT: means; tok/s: of output tokens. Same "
            f"answers: {alike}.{self._deterministic()}"
        )

    def _counts(self, rows: list[dict[str, Any]]) -> str:
        """How many answers a point has, and the hash of their prompts."""
        hashes = {row["questions"]: "" for row in rows}
        hashes |= {len(one.questions): one.prompts_sha256[:16] for [one, *_] in self.reports.values()}
        if len(hashes) == 1:
            [(number, sha256)] = hashes.items()
            return f"{number} answers per point, prompts sha256 {sha256}"
        named = "; ".join(f"{number}: {sha256}" for number, sha256 in sorted(hashes.items()))
        return f"{min(hashes)} to {max(hashes)} answers per point, prompts sha256 of {named}"

    def _deterministic(self) -> str:
        found = {name: reports[0].record.is_deterministic for (_, name), reports in self.reports.items()}
        names = [name for name, is_on in found.items() if is_on]
        if not names:
            return ""
        return f" Deterministic: {'yes' if len(names) == len(found) else ', '.join(names)}."


def load_grid(folder: Path) -> Grid:
    """The finished points of an evaluation in `folder`, from disk, and why others were left out.

    Refused: results that cannot be read.
    """
    plan = read_json("folder", folder / PLAN, "name the folder of an evaluation of several configurations")
    configs = plan["configurations"]
    reports: dict[Place, list[EvalReport]] = {}
    for concurrency, name in product(plan["concurrency"], configs):
        point = folder / folder_name(name) / f"c{concurrency}"
        repeats = sorted(point.glob(f"r*/{RECORD}"), key=lambda path: int(path.parent.name[1:]))
        if repeats:
            reports[concurrency, name] = [EvalReport.load(path.parent) for path in repeats]
    left_out = folder / LEFT_OUT
    return grid_of(reports, configs, read_json("folder", left_out) if left_out.exists() else {}, plan["repeats"])


def grid_of(
    reports: dict[Place, list[EvalReport]],
    configs: Mapping[str, Described | Mapping[str, Any]],
    failed: dict[str, str],
    asked: int,
) -> Grid:
    """The table of these reports, without the repeats in which every request failed, which are left out by name."""
    left_out = dict(failed)
    known: dict[Place, list[EvalReport]] = {}
    for (concurrency, name), repeats in reports.items():
        for number, report in enumerate(repeats, start=1):
            if report.record.error is None:
                known.setdefault((concurrency, name), []).append(report)
            else:
                place = f"{name} at concurrency {concurrency}, repeat {number} of {len(repeats)}"
                left_out[place] = report.record.error
    return Grid(known, bases_of(configs), left_out, asked)


def _server_text(record: RunRecord) -> str:
    known = f", {record.speculation}" if record.drafts else ""
    if failed := sum(record.counters.get("errors", {}).values()):
        known += f"; FAILED: {counted(failed, 'request')} had to be asked again, which is in the times"
    return f"{record.config['server']}{known}"


def _differing(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By configuration the settings in which it may differ from the others, but for speculation and graphs."""
    settings = [name for name in next(iter(configs.values()), {}) if name not in ("speculation", "graphs")]
    own = [name for name in settings if len({str(config[name]) for config in configs.values()}) > 1]
    return {which: "".join(f"; {name}={config[name]}" for name in own) for which, config in configs.items()}


def _paired(base: EvalReport, report: EvalReport) -> dict[str, Any]:
    """The change of the first score from `base`, question by question, and how many answers are the same."""
    kind = "text" if base.record.of_server or report.record.of_server else "token_ids"
    same = sum(ours[kind] == theirs[kind] for ours, theirs in zip(report.questions, base.questions, strict=True))
    score = report.overall[0]
    chosen = score.filter, score.metric
    found: dict[str, Any] = {"same_answers": same}
    if all(is_binary(one, *chosen) for one in (base, report)):
        changed = changes(base, report, *chosen)
        counts = {"lost": len(changed.lost), "gained": len(changed.gained), "p": changed.p_changed()}
        return found | {"difference": changed.delta, **counts}
    old, new = ([row["scores"][score.filter][score.metric] for row in one.questions] for one in (base, report))
    found["difference"] = score.value - base.overall[0].value
    if all(isinstance(value, int | float) for value in old + new) and len(old) > 1 and old != new:
        found["difference_stderr"] = stdev(b - a for a, b in zip(old, new, strict=True)) / len(old) ** 0.5
    return found


def _speedup(base: list[EvalReport], reports: list[EvalReport]) -> dict[str, Any]:
    """The ratio of output tok/s to `base`, with its interval and verdict."""
    before, after = (Replicates([Path()] * len(each), [one.record for one in each]) for each in (base, reports))
    found = speedup_of(METRICS["output_throughput"], before, after)
    if found is None:
        return {}
    numbers = {"speedup": found.ratio, "speedup_low": found.low, "speedup_high": found.high, "verdict": found.verdict}
    return {**numbers, "speedup_text": str(found) if found.verdict != ONE_REPEAT else f"{found.ratio:.2f}"}


def _score_text(score: Score) -> str:
    return f"{score.value:.3f}" + ("" if score.stderr is None else f" ± {score.stderr:.3f}")


def _difference_text(row: Mapping[str, Any]) -> str:
    text = f"{row['difference']:+.3f}"
    if "p" in row:
        return f"{text} (p = {row['p']:.2g})"
    return f"{text} ± {row['difference_stderr']:.3f}" if "difference_stderr" in row else text


def _named(score: Score, report: EvalReport) -> str:
    """The heading of a score: its filter, or its metric, or both where one of them does not tell scores apart."""
    filters, metrics = ({getattr(one, name) for one in report.overall} for name in ("filter", "metric"))
    if len(filters) == 1:
        return score.metric
    return score.filter if len(metrics) == 1 else f"{score.filter} {score.metric}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
