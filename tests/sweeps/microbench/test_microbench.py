"""The runner of the microbenchmarks: refusals, timing on a CPU, tables and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

from specbatch.sweeps.microbench import runner
from specbatch.sweeps.microbench.__main__ import app
from specbatch.sweeps.microbench.runner import Case, Table

ON_A_CPU = {"acceptance", "cache-accuracy", "cpu-decode", "cpu-gemm", "cpu-llama", "host-step", "http-client"}
ON_A_CPU |= {"job-memory", "maskbench", "state-sizes"}
KERNELS = sorted({str(command.name) for command in app.registered_commands} - ON_A_CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", KERNELS)
def test_benchmark_of_kernels_is_refused_without_a_device(name):
    result = CliRunner().invoke(app, [name])
    assert result.exit_code == 2
    assert (result.stdout, result.stderr) == ("", "error: needs a CUDA device and torch sees none here\n")


def test_variants_run_interleaved_and_times_are_per_operation(monkeypatch):
    monkeypatch.setattr(runner, "read_limit", lambda device: 1e9)
    clock = iter(range(0, 1000, 5))  # every call takes 5 s
    monkeypatch.setattr("specbatch.sweeps.machine.timing.time.perf_counter", lambda: next(clock))
    order = []
    calls = {"ours": [lambda: order.append("a"), lambda: order.append("b")], "theirs": [lambda: order.append("c")]}
    case = Case({"rows": 3}, calls, count=5, bytes=2e9, flop=3e12)
    on_cpu = partial(Table, unit="ms", device=torch.device("cpu"), repeats=2)
    table = on_cpu([case, {"rows": "ready"}], shows=("GB/s", "TFLOP/s"))
    assert table.measured() == [
        {
            "rows": 3,
            "ours (ms)": "500.00",
            "ours (GB/s)": "4",
            "ours (TFLOP/s)": "6",
            "theirs (ms)": "1000.00",
            "theirs (GB/s)": "2",
            "theirs (TFLOP/s)": "3",
        },
        {"rows": "ready"},
    ]
    assert "".join(order) == "abc" + "cab" + "abc"  # one round warms up
    (row,) = on_cpu([replace(case, flop=0)], shows=("floor",)).measured()
    assert (row["floor (ms)"], row["ours / floor"]) == ("2000.00", "0.25")


def test_gemms_of_a_cpu_as_a_table_and_as_json(monkeypatch):
    monkeypatch.setattr("specbatch.sweeps.machine.limits.CPU_READ_VALUES", 1000)
    monkeypatch.setattr("specbatch.sweeps.microbench.cpu_gemm.SHAPES", [(32, 16)])
    table = CliRunner().invoke(app, ["cpu-gemm"])
    assert table.exit_code == 0, table.output
    assert "| specbatch (ms)" in table.stdout
    found = json.loads(CliRunner().invoke(app, ["cpu-gemm", "--json"]).stdout)
    assert [row["rows"] for row in found["tables"][0]["rows"]] == [1, 2, 4, 8, 16, 40]
    assert found["versions"]["torch"] == version("torch")


def test_host_time_of_a_step_by_number_of_requests():
    settings = ["--requests", "2,5", "--prompt-tokens", "3", "--new-tokens", "16"]
    found = CliRunner().invoke(app, ["host-step", "--json", *settings])
    assert found.exit_code == 0, found.output
    [table] = json.loads(found.stdout)["tables"]
    assert [row["requests"] for row in table["rows"]] == [2, 5]
    for row in table["rows"]:
        assert 0 < float(row["median (us)"]) <= float(row["longest (us)"])
