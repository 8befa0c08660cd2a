"""A sweep in the layout of serving benchmarks: a block per point, and one summary by concurrency per configuration.

Lines and their order are those of `sglang.bench_serving` (0.5.23: sglang/benchmark/serving.py), so that results can be
read side by side. Vision tokens, of which there are none, have the line that its versions of 2025 have.
`specbatch.records.metrics` defines the numbers. Latencies are over the requests (ITL: the tokens) of all repeats
together, so that mean, percentiles and maximum are of the same sample. Other numbers are means over repeats. What a
repeat did not measure has no line, nor has a percentile of too few values. Concurrency is the mean number of unfinished
requests: the time from submission to last token, summed over requests and divided by the duration; peak
concurrent requests is their maximum (SGLang counts all that ran within one second).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specbatch.records.metrics import METRICS
from specbatch.records.request_metrics import DISTRIBUTIONS
from specbatch.records.run_record import RunRecord
from specbatch.records.run_totals import percentile_name
from specbatch.sweeps.report.points import point_name, points_of

Row = dict[str, Any]
WIDTH = 50
TITLE_WIDTH = 40
MEAN_CONCURRENCY, PEAK_CONCURRENCY, PEAK = "mean_concurrency", "peak_concurrency", "peak_output_throughput"
GOODPUT = "Goodput"


@dataclass(frozen=True)
class Line:
    """A number of the block: its title, its name in CSV and JSON, and the metric it is made of."""

    title: str
    column: str
    metric: str
    scale: float = 1
    decimals: int = 2


def _line_of(key: str, title: str) -> Line:
    metric = METRICS[key]
    return Line(title, key, key, metric.scale, decimals=2 if metric.decimals else 0)


def _times(name: str, *percents: int) -> tuple[Line, ...]:
    """Mean, percentiles and, of ITL, the maximum of a time."""
    parts = ["mean", *map(percentile_name, percents), *(["max"] if name == "itl" else [])]
    metrics = [METRICS[f"{part}_{name}_s"] for part in parts]
    quantity = DISTRIBUTIONS[name].quantity.replace("latency", "Latency")
    return tuple(
        Line(f"{part.title()} {quantity} ({metric.unit})", f"{part}_{name}_ms", metric.key, metric.scale)
        for part, metric in zip(parts, metrics, strict=True)
    )


BLOCK: dict[str, tuple[Line, ...]] = {
    "": (
        _line_of("requests", "Successful requests"),
        _line_of("duration_s", "Benchmark duration (s)"),
        _line_of("input_tokens", "Total input tokens"),
        Line("Total input text tokens", "input_text_tokens", "input_tokens", decimals=0),
        Line("Total input vision tokens", "input_vision_tokens", "input_vision_tokens", decimals=0),
        _line_of("output_tokens", "Total generated tokens"),
        _line_of("retokenized_tokens", "Total generated tokens (retokenized)"),
        _line_of("request_throughput", "Request throughput (req/s)"),
        _line_of("input_throughput", "Input token throughput (tok/s)"),
        _line_of("output_throughput", "Output token throughput (tok/s)"),
        _line_of(PEAK, "Peak output token throughput (tok/s)"),
        Line("Peak concurrent requests", PEAK_CONCURRENCY, PEAK_CONCURRENCY, decimals=0),
        _line_of("total_throughput", "Total token throughput (tok/s)"),
        Line("Concurrency", MEAN_CONCURRENCY, MEAN_CONCURRENCY),
        _line_of("accept_length", "Accept length"),
        _line_of("per_user_throughput", "Output per user (tok/s)"),
    ),
    GOODPUT: (
        Line("Request goodput (req/s)", "goodput", "goodput"),
        Line("SLO attainment (%)", "slo_attainment", "slo_share", scale=100),
    ),
    "End-to-End Latency": _times("e2e", 50, 90, 95, 99),
    "Time to First Token": _times("ttft", 50, 90, 95, 99),
    "Time per Output Token (excl. 1st token)": _times("tpot", 50, 90, 95, 99),
    "Inter-Token Latency": _times("itl", 50, 90, 95, 99),
}
# Columns of the summary by concurrency, after max_concurrency.
SUMMARY = (
    "input_throughput",
    "output_throughput",
    *(f"{part}_{name}_ms" for name in ("ttft", "tpot") for part in ("mean", "median", "p99")),
    "per_user_throughput",
    "accept_length",
)


def serving_rows(records: list[RunRecord]) -> list[Row]:
    """One row per concurrency and configuration with every number of the block; None where it was not measured."""
    return [_row(concurrency, name, found) for (concurrency, name), found in points_of(records).items()]


def _row(concurrency: int, name: str, records: list[RunRecord]) -> Row:
    row: Row = {
        "configuration": name,
        "backend": _backend(records[0]),
        "max_concurrency": concurrency,
        "is_capped": not records[0].workload.get("uncapped"),
        "request_rate": records[0].workload.get("request_rate"),
        "slo_ms": " ".join(f"{key.removesuffix('_s')}:{1e3 * most:g}" for key, most in _slo(records[0]).items())
        or None,
        "repeats": len(records),
        "simulated_accept_length": records[0].simulated_accept_length,
        "simulated_acceptance": records[0].simulated_acceptance,
    }
    measured = [_numbers(record) for record in records]
    for line in (line for lines in BLOCK.values() for line in lines):
        if (metric := METRICS.get(line.metric)) is not None and metric.part:
            value = metric.over_repeats(records)
        else:
            found = [numbers.get(line.metric) for numbers in measured]
            known = [number for number in found if number is not None]
            value = fmean(known) if known and len(known) == len(found) else None
        row[line.column] = None if value is None else value * line.scale
    return row


def _numbers(record: RunRecord) -> dict[str, float | None]:
    """The metrics of a record and what follows from them. Earlier versions counted the peak throughput in whole
    seconds, so that it was below the mean in short runs, and no peak of requests. In a closed loop that is the
    concurrency."""
    numbers = record.metrics
    mean, requests, duration = (numbers.get(name) for name in ("mean_e2e_s", "requests", "duration_s"))
    unfinished = mean * requests / duration if mean is not None and requests and duration else None
    work = record.workload
    is_closed = work.get("request_rate") is None and work.get("burst", 1) and not work.get("sequential")
    most = min(work["concurrency"], work["prompts"]) if is_closed and requests else None
    peak = numbers.get(PEAK)
    return numbers | {
        "input_vision_tokens": 0 if numbers.get("input_tokens") is not None else None,
        MEAN_CONCURRENCY: unfinished,
        PEAK_CONCURRENCY: numbers.get(PEAK_CONCURRENCY, most),
        PEAK: None if peak is None or peak < (numbers.get("output_throughput") or 0.0) else peak,
    }


def _slo(record: RunRecord) -> dict[str, float]:
    """The latency objectives in seconds, by the field of a request."""
    return record.workload.get("slo") or {}


def _backend(record: RunRecord) -> str:
    """The engine: this one, or the server by what it calls itself."""
    server = str(record.config.get("server") or "")
    return server.partition("(")[2].partition(")")[0] or "server" if server else "specbatch"


def block(row: Row) -> str:
    """The block of a point, without a final newline."""
    rate = row["request_rate"]
    head = {
        "Backend": row["backend"],
        "Configuration": row["configuration"],
        "Traffic request rate": "inf" if rate is None else f"{rate:g}",
        "Max request concurrency": row["max_concurrency"] if row["is_capped"] else "not set",
        "Repeats": row["repeats"],
    }
    if (model := row["simulated_acceptance"]) is not None:
        head["SIMULATED acceptance"] = model
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(title, str(value)) for title, value in head.items()]
    for section, numbers in BLOCK.items():
        if section == GOODPUT and row["slo_ms"] is None:
            continue
        if section:
            lines.append(f"{section:-^{WIDTH}}")
        if section == GOODPUT:
            lines.append(_line("SLOs (ms)", row["slo_ms"]))
        lines += [
            _line(line.title, _number(row[line.column], line.decimals))
            for line in numbers
            if row[line.column] is not None
        ]
    return "\n".join([*lines, "=" * WIDTH])


def _line(title: str, value: str) -> str:
    return f"{title + ':':<{TITLE_WIDTH}} {value}"


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def blocks_markdown(rows: list[Row]) -> str:
    """All blocks, each after the name of its point."""
    parts = (f"### {name_of(row)}\n\n```\n{block(row)}\n```\n" for row in rows)
    return "\n".join(parts)


def name_of(row: Row) -> str:
    return point_name(row["max_concurrency"], row["configuration"])


def summary_rows(rows: list[Row]) -> list[Row]:
    """One row per configuration and concurrency, those of a configuration together; the columns of `SUMMARY`."""
    names = dict.fromkeys(row["configuration"] for row in rows)
    return [
        {column: row[column] for column in ("configuration", "max_concurrency", *SUMMARY)}
        for name in names
        for row in rows
        if row["configuration"] == name
    ]


def summary_tables(rows: list[Row]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and cells of the summary of each configuration, with three decimals, as SGLang's tables have."""
    titles = ["max_concurrency", *SUMMARY]
    tables: dict[str, tuple[list[str], list[list[str]]]] = {}
    for row in summary_rows(rows):
        cells = [str(row["max_concurrency"]), *(_number(row[column], 3) for column in SUMMARY)]
        tables.setdefault(row["configuration"], (titles, []))[1].append(cells)
    return tables


def summary_markdown(rows: list[Row]) -> str:
    from tabulate import tabulate

    return "\n".join(
        f"### {name}\n\n{tabulate(body, headers=titles, tablefmt='github', disable_numparse=True)}\n"
        for name, (titles, body) in summary_tables(rows).items()
    )
