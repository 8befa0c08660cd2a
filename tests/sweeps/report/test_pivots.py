"""Pivot tables: one for each value of what differs within a cell, numbers over all repeats, and files that are made
again from what they say."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_report
from swept import saved, swept

from specbatch.errors import SpecbatchError
from specbatch.records.archive import pack
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.pivots import Pivot, asked_in, made, pivots
from specbatch.sweeps.report.report import write_report


def on(devices: int, name: str, concurrency: int, repeat: int = 1, **work: object) -> RunRecord:
    record = swept(f"{name} tensor-parallel={devices}", concurrency, repeat, **work)
    record.config["tensor_parallel"] = devices
    record.metrics["output_throughput"] = 100.0 * devices + concurrency + (repeat == 2)
    return record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    points = [(devices, name, size) for devices in (1, 2) for name in ("v1", "v2") for size in (32, 1)]
    return saved(
        tmp_path_factory.mktemp("sweep") / "out", *(on(*point, repeat) for point in points for repeat in (1, 2))
    )


def test_a_table_for_each_configuration_over_its_repeats(folder: Path) -> None:
    first, second, length, _ = pivots(
        folder, [Pivot.parse("tensor-parallel,concurrency,output_throughput,accept_length")]
    )
    assert (first.title, second.title, length.title) == ("v1: output tok/s", "v2: output tok/s", "v1: accept length")
    assert first.headings == ["tensor_parallel \\ concurrency", "1", "32"]
    assert first.cells == [["1", "101.5", "132.5"], ["2", "201.5", "232.5"]]


def test_a_percentile_is_of_the_requests_of_all_repeats(folder: Path) -> None:
    (table,) = pivots(folder / "v1 tensor-parallel=1", [Pivot.parse("configuration,concurrency,p90_ttft_s")])
    times = [row["ttft_s"] for repeat in (1, 2) for row in on(1, "v1", 32, repeat).requests]
    assert table.numbers.loc["v1 tensor-parallel=1", 32] == pytest.approx(np.percentile(times, 90))
    assert table.cells[0][1] == "-"  # 4 requests at concurrency 1


def test_files_say_what_makes_them_again(folder: Path, tmp_path: Path, no_plots: None) -> None:
    asked = [
        Pivot.parse("configuration,concurrency,accept_length"),
        Pivot.parse("concurrency,tensor_parallel,mean_ttft_s"),
    ]
    text, table = made(folder, asked)
    assert asked_in(text) == asked
    pack(folder, tmp_path / "records.tar.xz")
    assert made(tmp_path / "records.tar.xz", asked_in(text)) == (text, table)
    rows = list(csv.reader(table.splitlines()))
    assert rows[0][:2] == ["table", "configuration \\ concurrency"]
    assert {row[0] for row in rows[1:]} == {"accept length", "v1: mean TTFT (ms)", "v2: mean TTFT (ms)"}
    page = write_report(folder, tmp_path / "report", (), asked)[-1]
    assert (tmp_path / "report/pivots.md").read_text() == text
    assert "<caption>v2: mean TTFT (ms)</caption>" in page.read_text()


def test_rates_of_several_sweeps_are_an_axis(tmp_path: Path) -> None:
    for rate in (5.0, 1.0, None):
        record = swept("v2", 4, request_rate=rate)
        record.metrics["mean_itl_s"] = rate or 9.0
        for row in record.requests:
            row["itl_s"] = [rate or 9.0]
        saved(tmp_path / f"request-rate-{rate}", record)
    (table,) = pivots(tmp_path, [Pivot.parse("configuration,request_rate,mean_itl_s")])
    assert (table.headings[1:], table.cells) == (["1", "5", "inf"], [["v2", "1000.00", "5000.00", "9000.00"]])


def test_titles_name_what_was_not_real(tmp_path: Path) -> None:
    record = swept("v2", simulate=2.5)
    record.config["load_format"] = "dummy"
    (table,) = pivots(saved(tmp_path, record), [Pivot.parse("configuration,concurrency,accept_length")])
    assert table.title == "accept length (random weights, simulated acceptance (geometric, mean 2.5))"


def test_accuracy_of_an_evaluation(tmp_path: Path) -> None:
    report = make_report("1101", configuration="v2", concurrency=3, repeat=1, place=0)
    asked = [Pivot.parse("tensor_parallel,concurrency,accuracy,strict")]
    accuracy, strict = pivots(saved(tmp_path, report.record), asked)
    assert (accuracy.title, accuracy.cells) == ("accuracy (match, loose)", [["1", "0.750"]])
    assert (strict.title, strict.cells) == ("strict", [["1", "0.250"]])
    saved(tmp_path / "other", swept("v2", 3))
    titles = [table.title for table in pivots(tmp_path, asked)]
    assert len(titles) == 4
    assert {table.cells[0][1] for table in pivots(tmp_path, asked)} == {"0.750", "0.250", "-"}


def test_sweeps_of_other_prompts_have_tables_of_their_own(tmp_path: Path) -> None:
    for length in (8, 16):
        saved(tmp_path / str(length), swept("v2", input_len=length, section=f"ttft-{length}"))
    first, second = pivots(tmp_path, [Pivot.parse("configuration,concurrency,output-throughput")])
    assert (first.title, second.title) == ("input len 8: output tok/s", "input len 16: output tok/s")
    (table,) = pivots(tmp_path, [Pivot.parse("input_len,configuration,output_throughput")])
    assert [row[0] for row in table.cells] == ["8", "16"]


def test_sections_of_a_bench_have_tables_of_their_own(tmp_path: Path) -> None:
    for section in ("closed", "decode"):
        saved(tmp_path / section, swept("v2", section=section))
    tables = pivots(tmp_path, [Pivot.parse("configuration,concurrency,output_throughput")])
    assert [table.title for table in tables] == ["closed: output tok/s", "decode: output tok/s"]


def test_a_cell_has_repeats_of_one_point_only(tmp_path: Path) -> None:
    for size in (16, 32):
        record = swept("v2")
        record.config["page_size"] = size
        saved(tmp_path / str(size), record)
    with pytest.raises(SpecbatchError, match="runs of one cell differ in page_size 16 and 32: use it as rows"):
        pivots(tmp_path, [Pivot.parse("configuration,concurrency,accept_length")])
    (table,) = pivots(tmp_path, [Pivot.parse("page_size,concurrency,accept_length")])
    assert [row[0] for row in table.cells] == ["16", "32"]


def test_nothing_is_left_out(tmp_path: Path) -> None:
    """A setting that some records do not have, one that is a list or a switch, points that failed or were not run."""
    for name, layers in (("baseline", None), ("v1", [1, 2]), ("v2", True)):
        record = swept(name, 4, error="no memory" if name == "v2" else None)
        record.config["aux_layers"] = layers
        record.metrics["output_throughput"] = 7.0
        saved(tmp_path / "out", record)
    plan = {"configurations": {name: {} for name in ("baseline", "v1", "v2")}, "concurrency": [4, 8], "repeats": 1}
    (tmp_path / "out/sweep.json").write_text(json.dumps(plan))
    text, _ = made(tmp_path, [Pivot.parse("aux_layers,configuration,output_throughput")])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[2:] == [["-", "7.0", "-", "-"], ["[1, 2]", "-", "7.0", "-"], ["True", "-", "-", "FAILED"]]
    assert "* UNFINISHED: 3 points of out not measured" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("concurrency,output_throughput", "write ROWS,COLUMNS,VALUE"),
        ("concurrency,concurrency,accept_length", "rows and columns are the same"),
        ("tensor,concurrency,accept_length", "no record has the setting tensor; use one of .*tensor_parallel"),
        ("configuration,concurrency,speed", "no record has speed; use one of .*output_throughput"),
    ],
)
def test_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        pivots(folder, [Pivot.parse(text)])
