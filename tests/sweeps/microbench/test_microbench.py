"""The runner of the microbenchmarks: refusals, timing on a CPU, tables and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from specbatch.config.flags import InFlags, flags_of
from specbatch.errors import refuse
from specbatch.sweeps.microbench import runner
from specbatch.sweeps.microbench.__main__ import app
from specbatch.sweeps.microbench.runner import Case, Table

ON_A_CPU = {"acceptance", "cache-accuracy", "cpu-decode", "cpu-gemm", "cpu-llama", "host-step", "http-client"}
ON_A_CPU |= {"job-memory", "maskbench", "state-sizes"}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
KERNELS = sorted({str(command.name) for command in app.registered_commands} - ON_A_CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", KERNELS)
def test_benchmark_of_kernels_is_refused_without_a_device(name):
    result = CliRunner().invoke(app, [name])
    assert result.exit_code == 2
    assert (result.stdout, result.stderr) == ("", "error: needs a CUDA device and torch sees none here\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("maskbench --folder nowhere", "--folder='nowhere': it has no JSON files"),
        ("host-step --requests 1,x", "--requests='1,x': use whole numbers of at least 1"),
        ("cpu-decode --batches 0", "--batches=0: use a whole number of at least 1"),
        ("cpu-decode --prompt-tokens 9999", "--prompt-tokens + --new-tokens=10063: the model supports at most 8192"),
        ("http-client --concurrency -1", "--concurrency=-1: use a whole number of at least 1"),
        ("cache-accuracy --caches fp9", "--caches='fp9': use some of model, fp8-scale-1, fp8"),
        ("acceptance --data a --fewshot-data b", "--fewshot-data='b': cannot be read"),
    ],
)
def test_refusals_name_flags(words, message):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_option_is_named_as_it_is_written(command):
    """Of all commands, also those that need a GPU."""
    flags = flags_of(COMMANDS[command].params)
    for item in COMMANDS[command].params:
        message = InFlags(flags).message(refuse(item.name, 3, "use more"))
        assert message.split("=")[0] in (*item.opts, *item.secondary_opts)


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
