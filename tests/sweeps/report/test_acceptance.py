"""The table of acceptance of a report: counts of all repeats, its interval, and no column that depends on speed."""

from __future__ import annotations

import pytest
from swept import swept

from specbatch.sweeps.report.acceptance import acceptance_markdown, acceptance_rows
from specbatch.sweeps.report.note import Note
from specbatch.sweeps.report.report import table_files

RECORDS = [swept(name, 8, repeat) for repeat in (1, 2) for name in ("baseline", "v1")]


def test_counts_are_those_of_all_repeats() -> None:
    (row,) = acceptance_rows(RECORDS)  # the baseline drafts nothing
    requests = [one for record in RECORDS[1::2] for one in record.requests]
    emitted, verifies, accepted, drafted = (
        sum(one[name] for one in requests) for name in ("emitted", "verify_steps", "accepted", "drafted")
    )
    assert (row["concurrency"], row["configuration"], row["repeats"]) == (8, "v1", 2)
    assert (row["requests"], row["verify_steps"]) == (32, verifies)
    assert row["accept_length"] == emitted / verifies
    assert row["accept_rate"] == accepted / drafted
    assert row["accept_length_low"] < row["accept_length"] < row["accept_length_high"]
    text = acceptance_markdown(RECORDS, [row], [])
    assert f"| {row['accept_length']:.3f} ({row['accept_length_low']:.2f}-{row['accept_length_high']:.2f}) " in text


def test_other_speeds_make_the_same_table() -> None:
    slower = [swept(name, 8, repeat) for repeat in (1, 2) for name in ("baseline", "v1")]
    for record in slower:
        for key, value in record.metrics.items():
            if value is not None and (key.endswith("_s") or "throughput" in key):
                record.metrics[key] = 3 * value + record.workload["place"]
        for row in record.requests:
            row |= {key: 2 * row[key] for key in ("ttft_s", "tpot_s", "e2e_s")}
        record.counters["steps_by_rows"] = {"8": [40, 7.0 + record.workload["place"]]}
    for name in ("acceptance.md", "acceptance.csv"):
        assert table_files(slower, [])[name] == table_files(RECORDS, [])[name]
    assert table_files(slower, [])["summary.md"] != table_files(RECORDS, [])["summary.md"]


def test_few_prompts_have_no_interval_and_warnings_about_times_are_left_out() -> None:
    (row,) = rows = acceptance_rows([swept("v1", 2)])
    assert (row["accept_length_low"], row["accept_length_high"]) == (None, None)
    notes = [Note("loop", "CHECK OUTPUTS"), Note("slow", "STEP SPEEDUP DIFFERS"), Note("plain")]
    text = acceptance_markdown([swept("v1", 2)], rows, notes)
    assert f"| {row['accept_length']:.3f} |" in " ".join(text.split())
    assert "* CHECK OUTPUTS: loop" in text
    assert "slow" not in text
    assert "plain" not in text


@pytest.mark.parametrize("of_fewer", [0, 3])
def test_denominators_are_stated_where_verifies_have_fewer_drafts(of_fewer) -> None:
    record = swept("v1", 8)
    record.counters["acceptance"]["drafted"][2:] = [
        count - of_fewer for count in record.counters["acceptance"]["drafted"][2:]
    ]
    stated = '"Reached draft j" is a share of the verifies that drafted at least j tokens'
    for name in ("acceptance.md", "summary.md"):
        assert (stated in table_files([record], [])[name]) == bool(of_fewer)


@pytest.mark.parametrize("kind", ["md", "csv", "json"])
def test_nothing_drafted(kind) -> None:
    text = table_files([swept("baseline")], [])[f"acceptance.{kind}"]
    assert {"md": "Nothing was drafted." in text, "csv": text == "\n", "json": text == "[]\n"}[kind]
