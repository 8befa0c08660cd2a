"""The measured points of a sweep, from the records on disk: repeats, ratios to their bases, gains by steps.

A point is a concurrency and a configuration. A ratio is over the configuration's base (`specbatch.records.bases`); the
break-even is over the base in the same repeat, if that one has no speculation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from specbatch.errors import refuse
from specbatch.records.bases import bases_of
from specbatch.records.intervals import were_interleaved
from specbatch.records.metric import Metric
from specbatch.records.metrics import METRICS, keys_by_place
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import Replicates, measured
from specbatch.records.schema import PointRecord
from specbatch.records.steps import break_even
from specbatch.records.store import RECORD, WORKS, find_records
from specbatch.records.sweep_plan import point_of
from specbatch.records.verdicts import LOSES, ONE_REPEAT, PAYS, Speedup, speedup_of, speedup_over_runs

POINT = ("concurrency", "configuration")
Points = dict[tuple[Any, ...], list[RunRecord]]  # repeats by (concurrency, configuration)


@dataclass(frozen=True)
class View:
    """What a table shows.

    keys        metrics of the registry; the first one is shown with its spread
    ratio       the metric that the ratio compares
    break_even  the steps that break-even compares: those of all batch sizes, or of a full batch only; None: none
    brief       of the keys, those of the decision table
    judges      whether the ratio has a verdict: whether more (or less) of it is what one decides by
    """

    keys: tuple[str, ...] = keys_by_place("sweep")
    ratio: str = "output_throughput"
    break_even: Literal["all", "full"] | None = "all"
    brief: tuple[str, ...] = (
        *("output_throughput", "goodput", "accept_length", "untrimmed_accept_length", "median_ttft_s", "median_tpot_s"),
    )
    judges: bool = True

    @property
    def columns(self) -> dict[str, Metric]:
        return {key: METRICS[key] for key in self.keys}


SWEEP = View()


def load_records(folder: Path, schema: type[PointRecord] = PointRecord) -> list[RunRecord]:
    """The records of a sweep, ordered by concurrency, repeat and position in the round."""
    records = []
    for place, record in find_records("folder", folder, "*/c*/r*/record.json", schema):
        if point_of(record).folder(folder) != place:
            works = f"is the record of {point_of(record).folder(folder)}; {WORKS}"
            raise refuse("folder", str(place / RECORD), works)
        records.append(record)
    if not records:
        several = sorted({path.parents[3].name for path in folder.glob("*/*/c*/r*/record.json")})
        works = f"holds several sweeps; name the folder of one: {', '.join(several)}"
        none = "holds no records of a sweep (CONFIGURATION/cN/rN/record.json)" if folder.exists() else "no such folder"
        if (folder / RECORD).exists():
            none += "; it has a single run, whose table is its summary.md"
        raise refuse("folder", str(folder), works if several else none)
    return sorted(records, key=lambda record: [record.workload[key] for key in ("concurrency", "repeat", "place")])


def points_of(records: list[RunRecord]) -> Points:
    """The repeats of each (concurrency, configuration) that were `measured`."""
    points: Points = {}
    for record in records:
        points.setdefault(tuple(record.workload[key] for key in POINT), []).append(record)
    return {point: measured(repeats) for point, repeats in points.items()}


def point_name(concurrency: int, configuration: str) -> str:
    return f"{configuration} at concurrency {concurrency}"


def bases(records: list[RunRecord]) -> dict[str, str]:
    """The configuration that each one is compared with."""
    return bases_of({record.workload["configuration"]: record for record in records})


@dataclass(frozen=True)
class Gain:
    """What speculation gains by its steps at one point.

    accept_length, needed   means over repeats; needed is the break-even
    speedup                 accept_length / needed (the geometric mean over repeats), with its interval and verdict
    measures_step           acceptance was simulated with mean 1, so that no draft is accepted: only the step counts
    """

    accept_length: float
    needed: float
    speedup: Speedup
    measures_step: bool = False

    @property
    def share(self) -> float:
        return self.speedup.ratio - 1

    @property
    def is_shown(self) -> bool:
        """Whether the repeats show a gain or a loss."""
        return self.speedup.verdict in (PAYS, LOSES)

    def loses(self, tolerance: float = 0.0) -> bool:
        """Whether a loss of more than `tolerance` was measured, and the repeats (if several) show it."""
        return not self.measures_step and self.share < -tolerance and self.speedup.verdict in (LOSES, ONE_REPEAT)


def gains_of(records: list[RunRecord], view: View = SWEEP) -> dict[tuple[Any, ...], Gain | None]:
    """What speculation gains by its steps at each (concurrency, configuration); None where that is unknown."""
    points, over, needed = points_of(records), bases(records), break_evens(records, view)
    return {
        (concurrency, name): gain_of(
            ((record.metrics.get("accept_length"), needed.get(run_of(record))) for record in repeats),
            repeats[0].simulated_accept_length,
            interleaved=were_interleaved(points.get((concurrency, over[name]), repeats), repeats),
            anytime=wanted_precision(records) is not None,
        )
        for (concurrency, name), repeats in points.items()
    }


def gain_of(
    repeats: Iterable[tuple[float | None, float | None]],
    simulated: float | None = None,
    *,
    interleaved: bool = True,
    anytime: bool = False,
) -> Gain | None:
    """The gain from (accept length, break-even) of each repeat; None where a repeat has both in none.

    simulated: the mean of simulated accept lengths; interleaved, anytime: as for `speedup_over_runs`.
    """
    pairs = [
        (accepted, needed)
        for accepted, needed in repeats
        if accepted is not None and needed is not None and accepted > 0 and needed > 0  # NaN is neither
    ]
    if not pairs:
        return None
    accepted, needed = ([pair[side] for pair in pairs] for side in (0, 1))
    speedup = speedup_over_runs(needed, accepted, "higher", paired=True, interleaved=interleaved, anytime=anytime)
    return Gain(fmean(accepted), fmean(needed), speedup, simulated == 1)


def speedups_of(records: list[RunRecord], view: View = SWEEP) -> dict[tuple[Any, ...], Speedup]:
    """What `view.ratio` is relative to its base at each (concurrency, configuration) where both were measured, with the
    interval and the verdict that `compare` has for these two."""
    points: dict[tuple[Any, ...], Replicates] = {}
    metric, found = METRICS[view.ratio], {}
    for point, repeats in points_of(records).items():
        if known := [record for record in repeats if metric.read(record) is not None]:
            points[point] = Replicates([point_of(record).folder(Path()) for record in known], known)
    over = bases(records)
    for (concurrency, name), own in points.items():
        other = points.get((concurrency, over[name]))
        if name != over[name] and other is not None and (speedup := speedup_of(metric, other, own)):
            found[concurrency, name] = speedup
    return found


def precision_of(records: list[RunRecord]) -> dict[tuple[Any, ...], float]:
    """How exactly the ratios of output tok/s of `speedups_of` are known: half the length of their intervals."""
    found = {point: speedup.precision for point, speedup in speedups_of(records).items()}
    return {point: math.inf if precision is None else precision for point, precision in found.items()}


def wanted_precision(records: list[RunRecord]) -> float | None:
    """Of --until-precise; None where no rounds were to be added. Of a continued sweep with several, the largest."""
    return max((wanted for record in records if (wanted := record.workload.get("until_precise"))), default=None)


def run_of(record: RunRecord) -> tuple[Any, ...]:
    """Concurrency, configuration and repeat."""
    return tuple(record.workload[key] for key in (*POINT, "repeat"))


def break_evens(records: list[RunRecord], view: View) -> dict[tuple[Any, ...], float | None]:
    """The break-even of each run with speculation whose base has none and was measured in the same repeat."""
    over = bases(records)
    runs = {run_of(record): record for record in chain(*points_of(records).values())}
    found = {}
    for (concurrency, name, repeat), record in runs.items():
        base = runs.get((concurrency, over[name], repeat))
        if view.break_even is not None and record.drafts and base is not None and not base.drafts:
            full = [one.metrics.get("step_s") for one in (record, base)]
            of_full = full[0] / full[1] if full[0] and full[1] else None
            found[concurrency, name, repeat] = break_even(record, base) if view.break_even == "all" else of_full
    return found
