"""What is judged of a run: one table of names, units and which way is better, for `compare` and `gate` alike.

Every number's definition stands in `specbatch.records.metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Measure:
    """One number of a record.

    title, unit, factor, decimals   how it is shown: the record's number times `factor`, in `unit`
    rows    the fields of a request's row whose sums over the prompts divide to this number; a field alone is averaged
            over the requests that have it; None where it is no such thing (a rate of the run, a p99)
    median  the median of that field in place of its mean
    clock   is it time? Then it changes from run to run, and repeats say by how much; the rest follows from the prompts
    """

    title: str
    unit: str
    factor: float
    decimals: int
    better: Better
    rows: tuple[str, str | None] | None = None
    median: bool = False
    clock: bool = True


def _time(title: str, field: str | None, decimals: int = 1, *, median: bool = False) -> Measure:
    return Measure(title, "ms", 1e3, decimals, "lower", (field, None) if field else None, median)


# By the name in `RunRecord.metrics`, in the order of the tables.
MEASURES: dict[str, Measure] = {
    "output_throughput": Measure("output throughput", "tok/s", 1, 1, "higher"),
    "accept_length": Measure("accept length", "tokens", 1, 3, "higher", ("emitted", "verify_steps"), clock=False),
    "accept_rate": Measure("accept rate", "%", 100, 1, "higher", ("accepted", "drafted"), clock=False),
    "mean_ttft_s": _time("mean TTFT", "ttft_s"),
    "median_ttft_s": _time("median TTFT", "ttft_s", median=True),
    "p99_ttft_s": _time("p99 TTFT", None),
    "mean_tpot_s": _time("mean TPOT", "tpot_s", 2),
    "median_tpot_s": _time("median TPOT", "tpot_s", 2, median=True),
    "p99_tpot_s": _time("p99 TPOT", None, 2),
    "mean_e2e_s": _time("mean E2E", "e2e_s"),
    "p99_e2e_s": _time("p99 E2E", None),
    "step_s": _time("step", None, 2),
    "step_time_s": _time("mean step", None, 2),
    "device_idle_share": Measure("device idle", "%", 100, 1, "lower"),
    "host_waits_per_step": Measure("host waits per step", "", 1, 2, "lower"),
    "graph_coverage": Measure("graph coverage", "%", 100, 1, "higher"),
}
