"""Metric registry: the name, unit, definition and direction of every number of a run.

Tables, plots, `compare`, `gate` and the documentation take their titles, units and definitions from here. The numbers
are computed in `specbatch.records.summarize`. Records, CSV and JSON have them under `Metric.key`, times in seconds and
shares from 0 to 1; tables and plots show them in `Metric.unit`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np

from specbatch.core.request import INCOMPLETE

Better = Literal["higher", "lower"]


class HasMetrics(Protocol):
    """A run record, as far as metrics are read from it."""

    @property
    def metrics(self) -> Mapping[str, float | None]: ...


class HasRows(HasMetrics, Protocol):
    """A run record with the numbers of its requests."""

    @property
    def requests(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Metric:
    """One number of a run.

    key             its name in records, CSV and JSON
    title, unit     how tables call it
    definition      one sentence
    formula         how it is computed
    better          which direction is an improvement; None: neither
    scale           from the record's unit to `unit`
    decimals        digits that tables show
    quantity        what the glossary calls it: "TTFT" of its mean, median and p99
    per_request     (numerator, denominator) fields of a request's row, whose sums over the requests divide to this
                    number; without a denominator the field is averaged over the requests that have it. None: no such
                    fields (a rate of the whole run, a percentile)
    is_median       the median over the requests of that field, not its mean
    part, field     mean, median, p90, ... or max of the values of `field` in the rows of requests; "" of other metrics
    is_time         depends on the clock, so that it varies between repeats; other metrics follow from the prompts
    counts_only     what the denominator is limited to, so that it depends on the drafts: "drafts", or "drafted"
                    (verifies with drafts). Two runs whose drafts differ in that cannot be compared by it
    """

    key: str
    title: str
    unit: str
    definition: str
    formula: str
    better: Better | None = None
    scale: float = 1.0
    decimals: int = 1
    quantity: str = ""
    per_request: tuple[str, str | None] | None = None
    is_median: bool = False
    is_time: bool = True
    counts_only: Literal["", "drafts", "drafted"] = ""
    part: str = ""
    field: str = ""

    @property
    def heading(self) -> str:
        """Column heading: the title with its unit."""
        return self.title if not self.unit or self.title.endswith(self.unit) else f"{self.title} ({self.unit})"

    def read(self, record: HasMetrics) -> float | None:
        """The value in the record's unit; None where it was not measured."""
        return record.metrics.get(self.key)

    @property
    def percentile(self) -> int | None:
        """Which percentile of `field` it is; None for other metrics, and for the median, which has enough values where
        there is one."""
        return int(self.part[1:]) if re.fullmatch(r"p\d+", self.part) else None

    def over_repeats(self, records: Sequence[HasRows]) -> float | None:
        """The value over repeats in the record's unit; None if it was not measured.

        Mean, median, percentiles and maximum of a time are of the requests (or tokens) of all repeats together, so that
        they are in order; a percentile needs enough of them (`least_values`). Without the rows of the requests, those
        of several repeats have no median and no percentile. Of other metrics the mean over the repeats that measured
        it.
        """
        values = [value for record in records if (value := self.read(record)) is not None]
        if self.part == "max":
            return max(values, default=None)
        if self.part and (times := self._times(records)):
            if self.part == "mean":
                return fmean(times)
            percent = self.percentile or 50
            return float(np.percentile(times, percent)) if len(times) >= least_values(percent) else None
        if self.part not in ("", "mean") and len(records) > 1:
            return None
        return fmean(values) if values else None

    def _times(self, records: Sequence[HasRows]) -> list[float]:
        """The values of `field` in the rows; none if a record that measured them has lost them (`archive.DROPPED`)."""
        every: list[float] = []
        for record in records:
            rows = (row for row in record.requests if row.get("finish_reason") not in INCOMPLETE)
            found = [value for row in rows if (value := row.get(self.field)) is not None]
            own = [time for value in found for time in (value if isinstance(value, list) else (value,))]
            if not own and record.metrics.get(f"mean_{self.field}") is not None:
                return []
            every += own
        return every

    def text(self, value: float | None, decimals: int | None = None) -> str:
        """A value of a record in `unit`, as tables show it: "-" where nothing was measured."""
        if value is None or math.isnan(value):
            return "-"
        return f"{self.scale * value:.{self.decimals if decimals is None else decimals}f}"


@dataclass(frozen=True)
class Distribution:
    """A time per request or per token, of which a record holds mean, percentiles and maximum, in seconds."""

    name: str
    quantity: str
    definition: str
    formula: str
    percentiles: tuple[int, ...]
    decimals: int = 1
    per_request: bool = True

    @property
    def metrics(self) -> list[Metric]:
        parts = ["mean", *(percentile_name(percent) for percent in self.percentiles), "max"]
        return [self._metric(part) for part in parts]

    def _metric(self, part: str) -> Metric:
        averaged = self.per_request and part in ("mean", "median")
        return Metric(
            key=f"{part}_{self.name}_s",
            title=f"{part} {self.quantity}",
            unit="ms",
            definition=self.definition,
            formula=self.formula,
            better="lower",
            scale=1e3,
            decimals=self.decimals,
            quantity=self.quantity,
            per_request=(f"{self.name}_s", None) if averaged else None,
            is_median=part == "median",
            part=part,
            field=f"{self.name}_s",
        )


def least_values(percent: int) -> int:
    """How many values a percentile needs, so that at least one is expected above it: 100 for p99."""
    return 1 if percent <= 50 else math.ceil(100 / (100 - percent))


def percentile_name(percent: int) -> str:
    return "median" if percent == 50 else f"p{percent}"


DISTRIBUTIONS = {
    item.name: item
    for item in (
        Distribution(
            "ttft",
            "TTFT",
            "Time to first token: from the submission of a request until its first token is on the host. With a "
            "request rate, a request counts as submitted when it arrives.",
            "first token - submission",
            (50, 90, 95, 99),
        ),
        Distribution(
            "queue",
            "queue time",
            "The part of TTFT that a request waits before it is admitted.",
            "admission - submission",
            (50, 99),
        ),
        Distribution(
            "tpot",
            "TPOT",
            "Time per output token of a request, its first token left out.",
            "(last token - first token) / (output tokens - 1)",
            (50, 90, 95, 99),
            decimals=2,
        ),
        Distribution(
            "itl",
            "ITL",
            "Inter-token latency: the time between two arrivals of tokens, divided among the tokens of the second "
            "arrival.",
            "gap between arrivals / tokens in the arrival, counted once per token",
            (50, 90, 95, 99),
            decimals=2,
            per_request=False,
        ),
        Distribution(
            "e2e",
            "E2E latency",
            "From the submission of a request to its last token.",
            "last token - submission",
            (50, 90, 95, 99),
        ),
    )
}


def _throughput(key: str, title: str, what: str) -> Metric:
    return Metric(
        key,
        title,
        "req/s" if what == "Requests" else "tok/s",
        f"{what} per second of the measured window, which runs from the first submission to the last token.",
        f"{what.lower()} / duration",
        better="higher",
    )


def _count(key: str, title: str, definition: str, formula: str = "sum over requests", unit: str = "tokens") -> Metric:
    return Metric(key, title, unit, definition, formula, decimals=0, is_time=False)


_ALL = (
    _count("requests", "requests", "Requests that finished; aborted ones count in no metric.", "count", ""),
    Metric(
        "duration_s", "duration", "s", "Length of the measured window.", "last token - first submission", decimals=2
    ),
    _count("input_tokens", "input tokens", "Prompt tokens of the finished requests."),
    _count("cached_tokens", "cached tokens", "Prompt tokens that came from the prefix cache."),
    _count("output_tokens", "output tokens", "Tokens generated by the finished requests."),
    _count("scored_tokens", "scored tokens", "Continuation tokens whose likelihood was computed (scoring tasks)."),
    _throughput("request_throughput", "requests/s", "Requests"),
    _throughput("input_throughput", "input tok/s", "Input tokens"),
    _throughput("output_throughput", "output tok/s", "Output tokens"),
    _throughput("total_throughput", "total tok/s", "Input and output tokens"),
    Metric(
        "per_user_throughput",
        "per-user tok/s",
        "tok/s",
        "Output throughput divided among the concurrent requests.",
        "output throughput / concurrency",
        better="higher",
    ),
    Metric(
        "goodput",
        "goodput",
        "req/s",
        "Requests per second that met every objective of `--slo`. Failed requests met none, and an answer of one token "
        "has no TPOT to exceed.",
        "requests that met every objective / duration",
        better="higher",
        decimals=2,
    ),
    Metric(
        "slo_share",
        "met the SLO",
        "%",
        "Share of all requests, failed ones included, that met every objective of `--slo`.",
        "requests that met every objective / (finished + failed requests)",
        better="higher",
        scale=100,
    ),
    Metric(
        "peak_output_throughput",
        "peak output tok/s",
        "tok/s",
        "Output tokens per second in the busiest second, counted from the first submission. What follows the last "
        "whole second counts with it. Not measured in less than 2 s.",
        "max over seconds",
        better="higher",
    ),
    Metric(
        "peak_concurrency",
        "peak concurrent requests",
        "",
        "The most requests that were unfinished at the same time, those that waited for a slot included.",
        "max over time",
        decimals=0,
    ),
    Metric(
        "accept_length",
        "accept length",
        "",
        "Tokens emitted per verify, bonus token included. The first token (made by prefill), tokens trimmed after a "
        "stop and verifies from which no token was kept are not counted.",
        "tokens emitted by verifies / verifies",
        better="higher",
        decimals=3,
        per_request=("emitted", "verify_steps"),
        is_time=False,
    ),
    Metric(
        "accept_rate",
        "accept rate",
        "",
        "Share of drafted tokens that were accepted. Of a tree all nodes count as drafted. Drafts after a stop or the "
        "length limit are excluded, because their correctness is unknown.",
        "accepted drafts / drafted tokens",
        better="higher",
        decimals=3,
        per_request=("accepted", "drafted"),
        is_time=False,
        counts_only="drafts",
    ),
    Metric(
        "untrimmed_accept_length",
        "untrimmed accept length",
        "",
        "Of a server of another engine: tokens per verify that had drafts, before tokens after a stop or the limit are "
        "trimmed. Verifies without drafts are left out. This is what vLLM calls mean acceptance length; it is at least "
        "as high as the accept length.",
        "1 + accepted drafts / verifies with drafts",
        better="higher",
        decimals=3,
        is_time=False,
        counts_only="drafted",
    ),
    Metric(
        "untrimmed_accept_rate",
        "untrimmed accept rate",
        "",
        "Of a server of another engine: share of drafted tokens that were accepted, drafts after a stop or the limit "
        "included.",
        "accepted drafts / drafted tokens",
        better="higher",
        decimals=3,
        is_time=False,
        counts_only="drafts",
    ),
    Metric(
        "first_draft_accept_rate",
        "first-draft accept rate",
        "",
        "Share of the verifies that drafted anything in which the first draft was accepted.",
        "verifies that accepted draft 1 / verifies that drafted",
        better="higher",
        decimals=3,
        is_time=False,
        counts_only="drafted",
    ),
    Metric(
        "rows_per_verify",
        "rows per verify",
        "",
        "Rows that a verify of a request had on average with --verify-budget: its newest token, and the drafts that "
        "were verified. Only these drafts count in the accept rate.",
        "rows of verifies / verifies",
        decimals=3,
        per_request=("budget_rows", "verify_steps"),
        is_time=False,
    ),
    Metric(
        "corpus_share",
        "drafts of the corpus",
        "%",
        "Share of the drafted tokens that came from other answers (--corpus). The algorithm drafted the others.",
        "tokens drafted from the corpus / drafted tokens",
        scale=100.0,
        per_request=("corpus_drafted", "drafted"),
        is_time=False,
    ),
    Metric(
        "corpus_accept_length",
        "corpus accept length",
        "",
        "Tokens emitted per verify whose drafts came from the corpus, bonus token included.",
        "tokens emitted by verifies of corpus drafts / verifies of corpus drafts",
        better="higher",
        decimals=3,
        per_request=("corpus_emitted", "corpus_verifies"),
        is_time=False,
        counts_only="drafted",
    ),
    Metric(
        "corpus_accept_rate",
        "corpus accept rate",
        "",
        "Share of the tokens drafted from the corpus that were accepted.",
        "accepted drafts of the corpus / tokens drafted from the corpus",
        better="higher",
        decimals=3,
        per_request=("corpus_accepted", "corpus_drafted"),
        is_time=False,
        counts_only="drafts",
    ),
    _count("verify_steps", "verifies", "Verifies from which at least one token was kept.", unit=""),
    _count("drafted_tokens", "drafted tokens", "Drafts that count in the accept rate."),
    _count("accepted_tokens", "accepted tokens", "Drafts that were accepted."),
    _count("retractions", "retractions", "Times that a request gave its KV pages back and was recomputed.", unit=""),
    *(metric for item in DISTRIBUTIONS.values() for metric in item.metrics),
    Metric(
        "step_time_s",
        "mean step time",
        "ms",
        "From one iteration to the next, where no prefill ran between them. Without a CUDA device it is the host's "
        "time per iteration.",
        "device step + gap to the next; on a CPU iteration_s / iterations",
        better="lower",
        scale=1e3,
        decimals=2,
    ),
    Metric(
        "device_step_s",
        "device step time",
        "ms",
        "Time on the device's clock from the start to the end of an iteration. Not measured without a CUDA device.",
        "device_s / device_steps",
        better="lower",
        scale=1e3,
        decimals=2,
    ),
    Metric(
        "device_idle_share",
        "device idle",
        "%",
        "Share of the time that the device waits between iterations that follow each other without a prefill. If the "
        "device was already idle, the time of the launch call is not counted as idle. Not measured without a CUDA "
        "device.",
        "gaps / (gaps + iterations)",
        better="lower",
        scale=100,
    ),
    Metric(
        "launch_lead_s",
        "launch lead",
        "ms",
        "How far the host is ahead of the device: from the end of a launch until the result of the iteration before "
        "it. 0 if the previous result had already arrived (a late launch). Not defined after a prefill. Not measured "
        "where nothing overlaps (v1).",
        "mean over iterations of (previous result - end of launch)",
        scale=1e3,
        decimals=2,
    ),
    Metric(
        "late_launch_share",
        "late launches",
        "%",
        "Share of the launches that ended after the result of the iteration before them.",
        "late launches / launches with a lead",
        better="lower",
        scale=100,
    ),
    Metric(
        "host_waits_per_step",
        "host waits per step",
        "",
        "How often the host waits for a result while no other work is launched: 1 in v1, about 0 in v2.",
        "host waits / device steps",
        better="lower",
        decimals=2,
    ),
    Metric(
        "graph_coverage",
        "graph coverage",
        "%",
        "Share of the iterations and prefill passes that were replayed from CUDA graphs, of those for which graphs "
        "were requested.",
        "replays / (replays + eager fallbacks)",
        better="higher",
        scale=100,
        decimals=0,
    ),
    Metric(
        "host_step_s",
        "host time per step",
        "ms",
        "Host time of an iteration: launching it and waiting for a result.",
        "iteration_s / iterations",
        better="lower",
        scale=1e3,
        decimals=2,
    ),
    _count("decode_replays", "decode replays", "Iterations that were replayed from a CUDA graph.", "count", ""),
    _count(
        "target_prefill_replays", "prefill replays", "Prefill passes of the target replayed from graphs.", "count", ""
    ),
    _count(
        "draft_prefill_replays",
        "draft prefill replays",
        "Prefill passes of the draft model replayed from graphs.",
        "count",
        "",
    ),
    _count("graph_fallbacks", "fallbacks", "Passes that ran eagerly though graphs were requested.", "count", ""),
    _count("graph_padding", "padded", "Rows that were added to reach the size of a graph.", "sum over replays", ""),
    _count(
        "full_batch_steps", "full-batch steps", "Iterations that ran as many requests as the concurrency.", "count", ""
    ),
    Metric(
        "step_s",
        "full-batch step",
        "ms",
        "Mean time of the iterations (draft, verify, accept, commit) that ran as many requests as the concurrency. Not "
        "measured with fewer than 20 of them.",
        "seconds of these iterations, gaps without a prefill included / their number",
        better="lower",
        scale=1e3,
        decimals=2,
    ),
    Metric(
        "decode_throughput",
        "decode tok/s",
        "tok/s",
        "Tokens per second of a full batch, excluding prefill and the tail of the run.",
        "concurrency x accept length / full-batch step",
        better="higher",
        decimals=0,
    ),
    Metric(
        "step_bytes",
        "GB per step",
        "",
        "`bench`: bytes that a full-batch step must move: the weights that it uses (of a mixture, the experts that are "
        "hit on average if each token chooses at random), the KV cache at the mean context, and the states of "
        "recurrent layers, read and written once. Not computed for a step that runs a draft model.",
        "weights + requests x (mean context x bytes per token + states)",
        scale=1e-9,
        decimals=2,
        is_time=False,
    ),
    Metric(
        "step_bandwidth",
        "GB/s",
        "",
        "`bench`: bandwidth that the step reaches.",
        "bytes per step / full-batch step",
        better="higher",
        scale=1e-9,
        decimals=0,
    ),
    Metric(
        "sheet_share",
        "share of data-sheet bandwidth",
        "%",
        "`bench`: share of the data-sheet bandwidth that the step reaches.",
        "bandwidth of the step / bandwidth of the data sheet",
        better="higher",
        scale=100,
        decimals=0,
    ),
    Metric(
        "read_share",
        "share of measured read bandwidth",
        "%",
        "`bench`: share of the read bandwidth measured in the same run that the step reaches.",
        "bandwidth of the step / read bandwidth",
        better="higher",
        scale=100,
        decimals=0,
    ),
    Metric(
        "floor_s",
        "floor",
        "ms",
        "`bench`: time in which the device could read the bytes of a step.",
        "bytes per step / read bandwidth",
        scale=1e3,
        decimals=2,
    ),
    Metric(
        "gemm_s",
        "GEMMs alone",
        "ms",
        "`bench`: time of the target's GEMMs alone, on weights of the same shapes. Measured for dense attention models "
        "in BF16, FP16 and FP32.",
        "measured once for each number of rows with torch.nn.functional.linear",
        scale=1e3,
        decimals=2,
    ),
    Metric(
        "times_gemms",
        "times GEMMs",
        "",
        "`bench`: the full-batch step, or the TTFT of a single request, over its GEMMs alone.",
        "full-batch step or median TTFT / GEMMs alone",
        better="lower",
        decimals=2,
    ),
    Metric(
        "read_bytes_s",
        "read bandwidth",
        "TB/s",
        "`bench`: device memory bandwidth of a plain read.",
        "bytes / second",
        better="higher",
        scale=1e-12,
        decimals=2,
    ),
    Metric(
        "gemm_flop_s",
        "bf16 GEMM",
        "TFLOP/s",
        "`bench`: speed of a large BF16 GEMM.",
        "floating-point operations / second",
        better="higher",
        scale=1e-12,
        decimals=0,
    ),
)
METRICS: dict[str, Metric] = {metric.key: metric for metric in _ALL}

# Numbers that take the run of a baseline, too. No record holds them.
RELATIVE: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric(
            "break_even",
            "break-even accept length",
            "",
            "The accept length at which drafting is as fast as no speculation: drafting pays above it. The geometric "
            "mean over repeats, with its 95% interval. The baseline is that of the speedup.",
            "step time with drafts / step time of the baseline, both with the same number of requests",
            better="lower",
            decimals=3,
        ),
        Metric(
            "step_ratio",
            "speedup by steps",
            "",
            "How much faster the steps of speculation emit tokens than those of the baseline, prompts left out. The "
            "geometric mean over repeats, with its 95% interval.",
            "accept length / break-even accept length",
            better="higher",
            decimals=2,
        ),
        Metric(
            "ratio",
            "speedup",
            "",
            "Output throughput over that of the baseline: the geometric mean of the ratios of the rounds that both "
            "measured, with its 95% interval (a t interval of their logarithms; with --until-precise a confidence "
            "sequence). The baseline is the configuration without speculation that has the same prefill graphs and "
            "number of devices; where there is none, and for configurations without speculation, the one named "
            "`baseline`, else the first without speculation, else the first. It counts prompts, which drafting does "
            "not make faster. Sections of `bench` compare decode tok/s, full-batch steps or TTFT instead.",
            "output tok/s / output tok/s of the baseline",
            better="higher",
            decimals=2,
        ),
    )
}
# Columns of the acceptance table: title -> definition.
ACCEPTANCE: dict[str, str] = {
    "verifies": "Verifies from which at least one token was kept. Formula: sum over requests.",
    "reached draft 1, 2, ... (%)": "Share of the verifies that drafted at least j tokens in which draft j and all "
    "drafts before it were accepted.",
    "accepted where tried (%)": "Share of the verifies that accepted all drafts before draft j in which draft j was "
    'accepted, too. For drafts of equal length, "reached" is the cumulative product of these.',
    "emitted 1, 2, ... tokens (%)": "Share of the verifies that emitted that many tokens, bonus token included.",
    "accept length by context": "Accept length of the verifies after 2^k to 2^(k+1) - 1 tokens of prompt and output.",
}


def glossary() -> list[tuple[str, str]]:
    """(name, definition with formula) of every quantity, each once, in the order of the registry."""
    found: dict[str, str] = {}
    for metric in (*METRICS.values(), *RELATIVE.values()):
        found.setdefault(metric.quantity or metric.title, f"{metric.definition} Formula: {metric.formula}.")
    return list((found | ACCEPTANCE).items())


def glossary_markdown() -> str:
    """The glossary as a Markdown list, as docs/glossary.md has it."""
    return "".join(f"* **{name}**: {text}\n" for name, text in glossary())
