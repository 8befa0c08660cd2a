"""A sweep point by point: the block that serving benchmarks print, and one summary by concurrency per configuration.

The layout and the names are those of `sglang.bench_serving` (github.com/sgl-project/sglang) and of the tables made from
it, so that results can be read side by side. A number is the median over repeats; what it means is said in
`specbatch.records.metrics`. Concurrency is the mean number of unfinished requests: all time between submission and
last token, over the duration.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.tables import points_of

Row = dict[str, Any]
WIDTH = 50
TITLE_WIDTH = 40


@dataclass(frozen=True)
class Line:
    """A number of the block: its title, its column in CSV and JSON, the metric of a record it is made of."""

    title: str
    column: str
    metric: str
    factor: float = 1
    decimals: int = 2


def _times(title: str, name: str, *parts: str) -> tuple[Line, ...]:
    return tuple(Line(f"{part.title()} {title} (ms)", f"{part}_{name}_ms", f"{part}_{name}_s", 1000) for part in parts)


BLOCK: dict[str, tuple[Line, ...]] = {
    "": (
        Line("Successful requests", "requests", "requests", decimals=0),
        Line("Benchmark duration (s)", "duration_s", "duration_s"),
        Line("Total input tokens", "input_tokens", "input_tokens", decimals=0),
        Line("Total generated tokens", "output_tokens", "output_tokens", decimals=0),
        Line("Request throughput (req/s)", "request_throughput", "request_throughput"),
        Line("Input token throughput (tok/s)", "input_throughput", "input_throughput"),
        Line("Output token throughput (tok/s)", "output_throughput", "output_throughput"),
        Line("Peak output token throughput (tok/s)", "peak_output_throughput", "peak_output_throughput"),
        Line("Total token throughput (tok/s)", "total_throughput", "total_throughput"),
        Line("Output per user (tok/s)", "per_user_throughput", "per_user_throughput"),
        Line("Concurrency", "mean_concurrency", "mean_concurrency"),
        Line("Accept length", "accept_length", "accept_length"),
    ),
    "End-to-End Latency": _times("E2E Latency", "e2e", "mean", "median", "p90", "p99"),
    "Time to First Token": _times("TTFT", "ttft", "mean", "median", "p99"),
    "Time per Output Token (excl. 1st token)": _times("TPOT", "tpot", "mean", "median", "p99"),
    "Inter-Token Latency": _times("ITL", "itl", "mean", "median", "p95", "p99", "max"),
}
# The summary by concurrency: columns of the block, behind max_concurrency.
SUMMARY = (
    "input_throughput",
    "output_throughput",
    *(f"{part}_{name}_ms" for name in ("ttft", "tpot") for part in ("mean", "median", "p99")),
    "per_user_throughput",
    "accept_length",
)


def serving_rows(records: list[RunRecord]) -> list[Row]:
    """One row per concurrency and configuration with every number of the block; None where nothing was measured."""
    return [_row(concurrency, name, found) for (concurrency, name), found in points_of(records).items()]


def _row(concurrency: int, name: str, records: list[RunRecord]) -> Row:
    row: Row = {
        "configuration": name,
        "max_concurrency": concurrency,
        "request_rate": records[0].workload.get("request_rate"),
        "repeats": len(records),
        "simulated_accept_length": records[0].simulated_accept_length,
    }
    measured = [_numbers(record) for record in records]
    for line in (line for lines in BLOCK.values() for line in lines):
        values = [value for numbers in measured if (value := numbers.get(line.metric)) is not None]
        row[line.column] = median(values) * line.factor if values else None
    return row


def _numbers(record: RunRecord) -> dict[str, float | None]:
    numbers = record.metrics
    mean, requests, duration = (numbers.get(name) for name in ("mean_e2e_s", "requests", "duration_s"))
    unfinished = mean * requests / duration if mean is not None and requests and duration else None
    return numbers | {"mean_concurrency": unfinished}


def block(row: Row) -> str:
    """The point as people know it, without a line end."""
    rate = row["request_rate"]
    head = {
        "Configuration": row["configuration"],
        "Traffic request rate (req/s)": "inf" if rate is None else f"{rate:g}",
        "Max request concurrency": row["max_concurrency"],
        "Repeats (medians shown)": row["repeats"],
    }
    if (mean := row["simulated_accept_length"]) is not None:
        head["SIMULATED accept length"] = f"{mean:g}"
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(title, str(value)) for title, value in head.items()]
    for section, numbers in BLOCK.items():
        if section:
            lines.append(f"{section:-^{WIDTH}}")
        lines += [_line(line.title, _number(row[line.column], line.decimals)) for line in numbers]
    return "\n".join([*lines, "=" * WIDTH])


def _line(title: str, value: str) -> str:
    return f"{title + ':':<{TITLE_WIDTH}} {value}"


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def blocks_markdown(rows: list[Row]) -> str:
    """All blocks, each under the name of its point."""
    parts = (f"### {name_of(row)}\n\n```\n{block(row)}\n```\n" for row in rows)
    return "\n".join(parts)


def name_of(row: Row) -> str:
    return f"{row['configuration']} at concurrency {row['max_concurrency']}"


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
    """Titles and cells of the summary of each configuration, three decimals as in the block's own ecosystem."""
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
