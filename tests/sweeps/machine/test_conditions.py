"""GPU conditions during a point: lines of nvidia-smi, their summary, and the process that samples."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from specbatch.sweeps.machine import conditions as module
from specbatch.sweeps.machine.conditions import Sample, conditions, parse, sampled, summary

LINE = "0, 1755, 3201, 689.31, 61, 84, 0x0000000000000004\n"


def test_a_line_is_parsed():
    assert parse(LINE) == Sample(0, 1755, 3201, 689.31, 61, 84, 4)


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("1, 300, [N/A], 70.1, 30, [Not Supported], 0x0000000000000001\n", Sample(1, 300, None, 70.1, 30, None, 1)),
        ("0, 1980, 3201, 99.0, 40, 50, [N/A]\n", Sample(0, 1980, 3201, 99.0, 40, 50, 0)),
        (LINE[:-1], None),  # cut off when the process ended
        (LINE[:20] + "\n", None),
        ("Unable to determine the device handle for GPU0\n", None),
        ("\n", None),
    ],
)
def test_what_is_missing_is_none_and_what_is_no_sample_is_left_out(line: str, sample: Sample | None):
    assert parse(line) == sample


def test_summary_has_least_median_and_highest_of_each_gpu():
    samples = [
        Sample(0, clock, 3201, None, 60, None, reasons) for clock, reasons in ((1980, 0), (1700, 4), (1800, 0x24))
    ]
    found = summary([*samples, Sample(1, 345, 3201, 70, 30, 35, 1)])
    assert found["0"] == {
        "samples": 3,
        "sm_clock_mhz": [1700, 1800, 1980],
        "memory_clock_mhz": [3201] * 3,
        "temperature_c": [60] * 3,
        "throttle": {"power cap": 0.667, "software thermal slowdown": 0.333},
    }
    assert found["1"]["throttle"] == {}
    assert summary([]) == {}


def test_a_cpu_has_no_conditions():
    with conditions("cpu") as found:
        pass
    assert found == {}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program of this name in front of PATH; the fields known so far are forgotten."""

    def install(text: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        module._known_fields.cache_clear()

    yield install
    module._known_fields.cache_clear()


def test_samples_are_read_until_the_context_ends(nvidia_smi):
    """From a driver that knows the older name of the reasons only."""
    line = LINE.strip()
    nvidia_smi(f"case \"$*\" in *clocks_event*) exit 2;; *loop-ms*) while :; do echo '{line}'; sleep 0.01; done;; esac")
    with sampled() as samples:
        time.sleep(0.15)
    assert samples
    assert set(samples) == {parse(LINE)}


@pytest.mark.parametrize("text", ["exit 9", "echo no devices were found; exit 6"])
def test_without_a_working_nvidia_smi_there_are_no_samples(nvidia_smi, text: str):
    nvidia_smi(text)
    with sampled() as samples:
        pass
    assert samples == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_limits_and_clocks_of_a_gpu():
    with conditions("cuda:0") as found:
        time.sleep(1.2)
    for limits in found["limits"].values():
        assert limits["read_bytes_s"] > 1e11
        assert limits["gemm_flop_s"] > 1e12
    for gpu in found["gpus"].values():
        assert gpu["samples"] >= 1
        assert gpu["sm_clock_mhz"][0] > 0
