"""State of the GPUs while a point is measured: limits before and after it, clocks, power, temperatures, throttling.

The limits are the read bandwidth and the GEMM rate of an idle device, as `bench` measures them, but with less memory
and in less time. A card that is slow from the start shows low limits before the first point; one that gets hot shows
lower limits after a point than before it. Clocks and the rest are samples of `nvidia-smi` during the point.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import torch

from specbatch.sweeps.machine.limits import gemm_rate, read_bandwidth

SAMPLE_MS = 500
LIMIT_BYTES = 1 << 30  # an engine leaves that much free
LIMIT_REPEATS = 10
# Bits of clocks_event_reasons.active (NVML's nvmlClocksEventReasons).
REASONS = {
    0x2: "applications clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
# The name of the last field before driver 535.
_REASONS_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_FIELDS = ("index", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "temperature.memory")


class Sample(NamedTuple):
    """One line of `nvidia-smi`: index of the GPU, MHz, watts, degrees Celsius; None for what it does not tell."""

    gpu: int
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    memory_temperature_c: float | None
    reasons: int


@contextmanager
def conditions(device: str) -> Iterator[dict[str, Any]]:
    """Measure around a point on `device` (of the engine's caps): yields a table that is filled in when the point ends,
    and stays empty on anything but CUDA devices. For the `conditions` of its record:

    limits   {"before": {"read_bytes_s", "gemm_flop_s"}, "after": ..}, of the device; or an "error" in their place
    gpus     of each GPU that this process sees, by its index in `nvidia-smi`: least, median and highest of its samples
             for each field of `Sample`, the number of `samples`, and the share of them with each reason for lower
             clocks (`throttle`)
    """
    found: dict[str, Any] = {}
    if not device.startswith("cuda"):
        yield found
        return
    before = limits(torch.device(device))
    with sampled() as samples:
        yield found
    found["limits"] = {"before": before, "after": limits(torch.device(device))}
    found["gpus"] = summary(samples)


def limits(device: torch.device) -> dict[str, Any]:
    """Read bandwidth and GEMM rate now, in about 50 ms. A full device has no room for the measurement: an `error`."""
    try:
        found = {
            "read_bytes_s": read_bandwidth(device, size=LIMIT_BYTES, repeats=LIMIT_REPEATS),
            "gemm_flop_s": gemm_rate(device, repeats=LIMIT_REPEATS),
        }
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        torch.cuda.empty_cache()
    return found


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """Samples of the GPUs that this process sees, complete when the context ends; none without `nvidia-smi`."""
    samples: list[Sample] = []
    with TemporaryFile("w+") as file:
        process = _start(file)
        try:
            yield samples
        finally:
            if process is not None:
                process.terminate()
                process.wait()
                file.seek(0)
                samples += filter(None, map(parse, file))


def _start(file: IO[str]) -> subprocess.Popen[bytes] | None:
    fields = _known_fields()
    return None if fields is None else subprocess.Popen(_command(fields, f"--loop-ms={SAMPLE_MS}"), stdout=file)


@cache
def _known_fields() -> str | None:
    """The fields that this version of `nvidia-smi` knows; None without one that works."""
    for reasons in _REASONS_FIELDS:
        fields = ",".join((*_FIELDS, reasons))
        try:
            subprocess.run(_command(fields), capture_output=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        return fields
    return None


def _command(fields: str, *options: str) -> list[str]:
    gpus = (torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count()))
    names = ",".join(f"GPU-{uuid}" for uuid in gpus)
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={names}", *options]


def parse(line: str) -> Sample | None:
    """A line of `nvidia-smi`; None for one that was cut off."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(Sample._fields) or not line.endswith("\n") or not cells[0].isdigit():
        return None
    sm, memory, power, temperature, hot = (_number(cell, float) for cell in cells[1:-1])
    reasons = _number(cells[-1], lambda text: int(text, 16)) or 0
    return Sample(int(cells[0]), sm, memory, power, temperature, hot, int(reasons))


def _number(cell: str, read: Callable[[str], float]) -> float | None:
    try:
        return read(cell)
    except ValueError:  # [N/A], [Not Supported]
        return None


def summary(samples: list[Sample]) -> dict[str, dict[str, Any]]:
    """The table `gpus` of `conditions`."""
    found: dict[str, dict[str, Any]] = {}
    for gpu in sorted({sample.gpu for sample in samples}):
        own = [sample for sample in samples if sample.gpu == gpu]
        table: dict[str, Any] = {"samples": len(own)}
        for name in Sample._fields[1:-1]:
            if values := [value for sample in own if (value := getattr(sample, name)) is not None]:
                table[name] = [min(values), median(values), max(values)]
        shares = {name: sum(bool(sample.reasons & bit) for sample in own) / len(own) for bit, name in REASONS.items()}
        table["throttle"] = {name: round(share, 3) for name, share in shares.items() if share}
        found[str(gpu)] = table
    return found
