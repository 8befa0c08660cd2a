"""`sweep --request-rate 1,5,inf`: each rate in a folder of its own, all in one table, without a cap."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from specbatch.progress.bars import time_text
from specbatch.sweeps.report.points import load_records
from specbatch.sweeps.report.serving import block, serving_rows
from specbatch.sweeps.workload.workloads import Workload

TOY = "--model toy --load-format dummy --device cpu --configs baseline,v2 --repeats 1 --out out"


@pytest.fixture
def run(run_toy: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    return run_toy(TOY.split())


def works(rate: str) -> dict[str, object]:
    (path,) = Path(f"out/request-rate-{rate}/v2").glob("c*/r1/record.json")
    return dict(json.loads(path.read_text())["workload"])


def test_rates(run: Callable[..., Result]) -> None:
    command = "sweep --request-rate 200,inf --num-prompts 5 --input-len 8 --output-len 4"
    result = run(command)
    rows = list(csv.DictReader(Path("out/summary.csv").read_text().splitlines()))
    assert [(row["request_rate"], row["configuration"], row["concurrency"]) for row in rows] == [
        ("200", "baseline", "5"), ("200", "v2", "5"), ("inf", "baseline", "5"), ("inf", "v2", "5"),
    ]  # fmt: skip
    first, last = works("200"), works("inf")
    assert (first["request_rate"], first["burst"], first["prompts"]) == (200, 1, 5)
    assert (last["request_rate"], last["burst"], last["prompts"]) == (None, 0, 5)
    assert (first["uncapped"], last["uncapped"]) == (True, True)
    assert first["prompts_sha256"] == last["prompts_sha256"]
    served = serving_rows(load_records(Path("out/request-rate-inf")))
    assert "Max request concurrency:                 not set\n" in block(served[0])
    assert "200 requests per second" in result.stdout
    assert run(command).stderr.count("2 of 2 points are finished") == 2


def test_a_rate_with_a_concurrency_is_capped(run: Callable[..., Result]) -> None:
    run("sweep --request-rate 200 --concurrency 2 --input-len 8 --output-len 4")
    (path,) = Path("out/v2").glob("c2/r1/record.json")
    work = json.loads(path.read_text())["workload"]
    assert "uncapped" not in work
    assert (work["request_rate"], work["prompts"]) == (200, 4)


def test_a_dry_run_plans_every_rate(run: Callable[..., Result], known_speeds: None) -> None:
    command = "sweep --request-rate 0.01,inf --num-prompts 5 --input-len 8 --output-len 4"
    result = run(f"{command} --dry-run")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if "|" in line]
    rows = [line for line in lines if line[0] in ("baseline", "v2")]
    assert [row[:4] for row in rows] == 2 * [["baseline", "5", "1", "5"], ["v2", "5", "1", "5"]]
    assert re.findall(r"^request_rate (.*):$", result.stdout, re.MULTILINE) == ["0.01", "inf"]
    last = Workload(request_rate=0.01).arrivals(5)
    assert last is not None
    assert (rows[0][-1], rows[2][-1]) == (time_text(last[-1]), "0 s")
    assert "; 5 prompts; no cap" in result.stderr  # not the first rate
    assert "; one after the other: request-rate 0.01, inf\n" in result.stderr


def test_a_dry_run_leaves_out_what_is_finished(run: Callable[..., Result]) -> None:
    command = "sweep --num-prompts 4 --input-len 8 --output-len 4 --request-rate"
    run(f"{command} 200,inf")
    assert re.findall(r"(\d) points, about", run(f"{command} 200,300,inf --dry-run").stdout) == ["0", "2", "0", "2"]


def test_some_of_the_rates_keep_the_table_of_all(run: Callable[..., Result]) -> None:
    command = "sweep --input-len 8 --output-len 4 --request-rate"
    run(f"{command} 200,300,inf --num-prompts 4")
    before = Path("out/summary.csv").read_text()
    run(f"{command} 200,inf --num-prompts 4")
    assert Path("out/summary.csv").read_text() == before
    for more in ("", " --dry-run"):  # 100 would run first
        result = run(f"{command} 100,200 --num-prompts 5{more}", exit_code=2)
        assert "request-rate-200': is of a sweep with another" in result.stderr
    assert not Path("out/request-rate-100").exists()
    assert Path("out/summary.csv").read_text() == before


def test_sweeps_of_one_and_of_several_rates_do_not_share_a_folder(run: Callable[..., Result]) -> None:
    command = "sweep --num-prompts 4 --input-len 8 --output-len 4 --request-rate"
    run(f"{command} 200,inf")
    before = Path("out/summary.md").read_text()
    assert "not empty" in run(f"{command} 200", exit_code=2).stderr
    assert Path("out/summary.md").read_text() == before
    shutil.rmtree("out")
    run(f"{command} 200")
    assert "not empty" in run(f"{command} 200,inf", exit_code=2).stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--request-rate 1,x", "use requests per second above 0, or inf, separated by commas"),
        ("--request-rate 1,-5", "use requests per second above 0"),
        ("--request-rate 1,1.0", "1 is given twice"),
        ("--request-rate 1,inf --burst all", "--request-rate=1.0: all prompts arrive at once; leave it out"),
        ("--request-rate 1,inf --burst 2", "--burst=2: goes with a finite --request-rate"),
        ("--request-rate 1,inf --burst 2 --dry-run", "--burst=2: goes with a finite --request-rate"),
        (
            "--request-rate 5 --prompts-per-concurrency 2",
            "there is no concurrency without --concurrency; use --num-prompts",
        ),
        ("--concurrency 2 --num-prompts 4 --prompts-per-concurrency 2", "--prompts-per-concurrency sets it, too"),
        ("--concurrency 9 --num-prompts 4", "there are 4 prompts; use at most 4, or a larger --num-prompts"),
        ("--dataset gsp --num-prompts 4", "runs all groups"),
        ("--dataset sharegpt", "--data: sharegpt is not bundled; name ShareGPT_V3"),
        ("--dataset sharegpt --data x.json --output-len 4", "as long as those of its rows; leave it out"),
    ],
)
def test_refused(run: Callable[..., Result], options: str, reason: str) -> None:
    Path("x.json").write_text("[]")
    assert reason in run(f"sweep {options}", exit_code=2).stderr
    assert not Path("out").exists()
