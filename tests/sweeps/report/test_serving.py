"""The block of serving benchmarks and the summary by concurrency: numbers, units, layout."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from swept import swept

from specbatch.records.sweep_plan import point_of
from specbatch.sweeps.report.serving import (
    BLOCK,
    SUMMARY,
    WIDTH,
    block,
    blocks_markdown,
    serving_rows,
    summary_markdown,
    summary_rows,
    summary_tables,
)

RECORDS = [
    swept(name, concurrency, repeat) for concurrency in (1, 4) for name in ("baseline", "v2") for repeat in (1, 2, 3)
]


def of(record, field):
    return [time for row in record.requests for time in np.atleast_1d(row[field])]


def row_of(rows, name, concurrency):
    return next(row for row in rows if (row["configuration"], row["max_concurrency"]) == (name, concurrency))


def value(text, title):
    (line,) = (line for line in text.splitlines() if line.startswith(f"{title}:"))
    return line.partition(":")[2].strip()


def test_rows_are_in_the_units_of_their_titles():
    row = row_of(serving_rows(RECORDS), "v2", 4)
    found = [
        one.metrics for one in RECORDS if one.workload["configuration"] == "v2" and one.workload["concurrency"] == 4
    ]
    assert row["repeats"] == 3
    assert row["output_throughput"] == fmean(one["output_throughput"] for one in found)
    assert row["accept_length"] == fmean(one["accept_length"] for one in found)
    assert row["p99_ttft_ms"] is None  # of 24 requests
    for name in ("ttft", "itl"):
        together = [time for one in RECORDS if point_of(one)[:3:2] == ("v2", 4) for time in of(one, f"{name}_s")]
        expected = {"mean": np.mean, "median": np.median, "p90": lambda times: np.percentile(times, 90)}
        for part, number in expected.items():
            assert row[f"{part}_{name}_ms"] == pytest.approx(1000 * number(together))
    assert row["p99_itl_ms"] == pytest.approx(1000 * np.percentile(together, 99))
    assert row["max_itl_ms"] == pytest.approx(1000 * max(together))


def test_concurrency_is_the_mean_number_of_unfinished_requests():
    made = swept("v2", 4)
    row = serving_rows([made])[0]
    together = sum(request["e2e_s"] for request in made.requests)
    assert row["mean_concurrency"] == pytest.approx(together / made.metrics["duration_s"])


def test_block_has_the_format_of_other_benchmarks():
    row = row_of(serving_rows(RECORDS), "v2", 4)
    text = block(row)
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * WIDTH
    assert "---------------Time to First Token----------------" in lines
    assert all(line.index(":") < 40 for line in lines if ":" in line)
    assert value(text, "Successful requests") == "8"
    assert value(text, "Traffic request rate") == "inf"
    assert value(text, "Max request concurrency") == "4"
    assert "P99 TTFT" not in text  # too few requests
    assert value(text, "P99 ITL (ms)") == f"{row['p99_itl_ms']:.2f}"
    assert value(text, "Mean ITL (ms)") == f"{row['mean_itl_ms']:.2f}"
    assert value(text, "Accept length") == f"{row['accept_length']:.2f}"
    titles = [line.title for lines in BLOCK.values() for line in lines if row[line.column] is not None]
    assert len(titles) == len(set(titles)) == sum(f"{title}:" in text for title in titles)


def test_columns_of_a_block_are_of_one_sample():
    """Also where one repeat is much slower than the others: its maximum is that of all."""
    records = [swept("v2", 4, repeat) for repeat in range(1, 10)]
    for request in records[0].requests:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            request[name] *= 50
        request["itl_s"] = [50 * time for time in request["itl_s"]]
    for name in ("ttft", "tpot", "itl", "e2e"):
        records[0].metrics[f"max_{name}_s"] = max(of(records[0], f"{name}_s"))
        records[0].metrics[f"median_{name}_s"] *= 50
    row = serving_rows(records)[0]
    for name in ("ttft", "tpot", "itl", "e2e"):
        every = [1000 * time for one in records for time in of(one, f"{name}_s")]
        parts = [row.get(f"{part}_{name}_ms") for part in ("median", "p90", "p95", "p99", "max")]
        known = [min(every), *(part for part in parts if part is not None), max(every)]
        assert known == pytest.approx(sorted(known)), name


def test_peaks_are_not_below_their_means():
    made = swept("v2", 4)
    assert serving_rows([made])[0]["peak_output_throughput"] == 99.0
    old = swept("v2", 4, 2)
    old.metrics["peak_output_throughput"] = 0.9 * old.metrics["output_throughput"]  # of an earlier version
    for records in ([old], [made, old]):
        row = serving_rows(records)[0]
        assert row["peak_output_throughput"] is None
        assert "Peak output" not in block(row)
    assert row["peak_concurrency"] >= row["mean_concurrency"]


# sglang/benchmark/serving.py of 0.5.23, for text, with the line of vision tokens of its versions of 2025
SGLANG = """Backend|Traffic request rate|Max request concurrency|Successful requests|Benchmark duration (s)|
Total input tokens|Total input text tokens|Total input vision tokens|
Total generated tokens|Total generated tokens (retokenized)|
Request throughput (req/s)|Input token throughput (tok/s)|Output token throughput (tok/s)|
Peak output token throughput (tok/s)|Peak concurrent requests|Total token throughput (tok/s)|Concurrency|Accept length|
SLOs (ms)|Request goodput (req/s)|
SLO attainment (%)|Mean E2E Latency (ms)|Median E2E Latency (ms)|P90 E2E Latency (ms)|P95 E2E Latency (ms)|
P99 E2E Latency (ms)|Mean TTFT (ms)|Median TTFT (ms)|P90 TTFT (ms)|P95 TTFT (ms)|P99 TTFT (ms)|Mean TPOT (ms)|
Median TPOT (ms)|P90 TPOT (ms)|P95 TPOT (ms)|P99 TPOT (ms)|Mean ITL (ms)|Median ITL (ms)|P90 ITL (ms)|P95 ITL (ms)|
P99 ITL (ms)|Max ITL (ms)""".replace("\n", "").split("|")


def test_block_has_every_line_of_sglang_in_its_order():
    made = swept("v2", 64, slo={"ttft_s": 0.5, "tpot_s": 0.03})
    made.metrics |= {"goodput": 1.5, "slo_share": 0.75, "peak_output_throughput": 9999.0}
    made.metrics["retokenized_tokens"] = 130889
    text = block(serving_rows([made])[0])
    found = [line.partition(":")[0] for line in text.splitlines() if ":" in line]
    assert [title for title in found if title in SGLANG] == SGLANG
    assert value(text, "SLOs (ms)") == "ttft:500 tpot:30"
    assert (value(text, "Request goodput (req/s)"), value(text, "SLO attainment (%)")) == ("1.50", "75.00")
    assert value(text, "Peak concurrent requests") == "64"
    assert value(text, "Total input vision tokens") == "0"
    assert value(text, "Total generated tokens (retokenized)") == "130889"
    assert "Goodput" not in block(serving_rows([swept("v2", 4)])[0])


def test_peak_concurrent_requests_with_arrivals():
    arriving = swept("v2", 4, request_rate=2.0)
    assert "Peak concurrent" not in block(serving_rows([arriving])[0])  # of an earlier version
    arriving.metrics["peak_concurrency"] = 7
    assert value(block(serving_rows([arriving])[0]), "Peak concurrent requests") == "7"


def test_missing_measurements_are_left_out():
    made = swept("v1")
    made.metrics |= {"mean_tpot_s": None, "mean_e2e_s": None}
    made.requests = [row | {"tpot_s": None} for row in made.requests]
    row = serving_rows([made])[0]
    assert row["mean_tpot_ms"] is row["mean_concurrency"] is None
    assert "Mean TPOT" not in block(row)
    assert "\nConcurrency" not in block(row)


def test_arrivals_and_simulation_are_shown():
    text = block(serving_rows([swept("v1", simulate=2.4, request_rate=10.5)])[0])
    assert value(text, "Traffic request rate") == "10.5"
    assert value(text, "SIMULATED acceptance") == "geometric, mean 2.4"
    assert "SIMULATED" not in block(serving_rows([swept("v1")])[0])


def test_summary_has_a_table_for_each_configuration():
    rows = serving_rows(RECORDS)
    assert [(row["configuration"], row["max_concurrency"]) for row in summary_rows(rows)] == [
        ("baseline", 1), ("baseline", 4), ("v2", 1), ("v2", 4),
    ]  # fmt: skip
    tables = summary_tables(rows)
    assert list(tables) == ["baseline", "v2"]
    titles, body = tables["v2"]
    assert titles == ["max_concurrency", *SUMMARY]
    assert [cells[0] for cells in body] == ["1", "4"]
    cell = body[1][titles.index("median_tpot_ms")]
    assert cell == f"{row_of(rows, 'v2', 4)['median_tpot_ms']:.3f}"
    text = summary_markdown(rows)
    assert text.count("### ") == 2
    assert f" {cell} " in text


def test_blocks_have_headings():
    text = blocks_markdown(serving_rows(RECORDS))
    assert text.count("```") == 8
    assert "### v2 at concurrency 4\n\n```\n====" in text
