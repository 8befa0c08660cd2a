"""Every number's definition, and the record that tables and plots are made from.

* accept length: tokens emitted per verify, bonus included = sum of emitted / sum of verifies over the run. The first
  token (made by prefill), tokens trimmed past a stop and verifies that left nothing count in neither.
* drafted: what a verify drafted (of a tree: all nodes), less the drafts cut off behind a stop or the length limit, of
  which nobody can say whether they were right. All that follows counts the same drafts.
* accept rate: correct drafts / drafted. Of chains it is the mean of the shares reached, weighed by how often each draft
  was drafted.
* draft j (the first is 1) of a verify is reached where it and all before it are accepted, and tried where all before it
  are. Share reached: of the verifies that drafted it; share accepted where tried: of those that tried it, so that the
  shares reached of equally long drafts are products of these. first_draft_accept_rate is draft 1's, where both are the
  same.
* accept length by context: of the verifies behind 2^k to 2^(k+1) - 1 tokens (prompt and output, the root included).
* TTFT: first token ready on the host - request submitted; queue: the part of it before the request was admitted. With
  arrivals by a clock, a request counts as submitted when it arrives, wherever it then waits.
* TPOT: (last - first token) / (tokens - 1). ITL: gap between arrivals / tokens in the arrival, once per token.
* E2E: last token - submitted. Times are seconds.
* throughput: requests, input tokens, output tokens per second of the measured window (first submission to last
  token); per user: output / concurrency; peak: output tokens in the fullest second after the first submission.
* device step: time between the device's clocks before and behind an iteration; device idle share: gaps between
  iterations that follow each other without a prefill, over gaps and iterations; where the device had run dry, the
  launch call itself counts as busy. None without a CUDA device.
* step time: from one iteration to the next, if no prefill lies between: device step and gap; without a CUDA device the
  host's `iteration_s / iterations`.
* step time at n rows: the same, of the iterations that ran n requests alone: their seconds / their number.
* break-even: the accept length at which drafting is as fast as plain decoding = step time of the run that drafts / step
  time of plain decoding at the same concurrency. Drafting pays above it, by accept length / break-even - 1.
* launch lead: from the end of a launch to the result of the iteration before it, which is how far the host is ahead;
  0 where that result was there already (a late launch). Iterations behind a prefill have none: the device was busy
  with that. None where nothing overlaps (v1).
* host waits per step: waits for a result with nothing launched behind it: 1 for v1, about 0 for v2.
* graph coverage: replays / (replays + eager fallbacks), over the iterations and prompt passes for which graphs were
  asked; None where none were.
* draft_lengths (with draft_tokens="auto"): steps by batch bucket and tokens drafted; caps hold the seconds of an
  iteration of each at start (`draft_length_s`), over rows for padding with next to no context.
* scoring (of given texts, by `Engine.score`): scored tokens are those of continuations, input tokens those of contexts
  too; requests, input tokens per second of the time spent scoring. A window in which nothing else ran has no others.
* counters: `iteration_s / iterations` is the host's time to launch an iteration and to wait for its result.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from specbatch import __version__
from specbatch.core.request import Completion
from specbatch.records.acceptance import Acceptance

SCHEMA = 1
_PERCENTILES = {
    "ttft_s": (50, 90, 95, 99),
    "tpot_s": (50, 90, 95, 99),
    "itl_s": (50, 90, 95, 99),
    "e2e_s": (50, 90, 99),
}


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default). `values` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    """mean_, median_, p90_ ... and max_ of `name`; None where nothing was measured."""
    out: dict[str, float | None] = {f"mean_{name}": sum(values) / len(values) if values else None}
    for percent in _PERCENTILES.get(name, (50, 99)):
        label = "median" if percent == 50 else f"p{percent}"
        out[f"{label}_{name}"] = percentile(values, percent) if values else None
    out[f"max_{name}"] = max(values) if values else None
    return out


def summarize(
    completions: Iterable[Completion], duration_s: float, concurrency: int | None = None
) -> dict[str, float | None]:
    """All numbers of a run of finished requests over a window of `duration_s`; aborted requests count nowhere."""
    done = [item for item in completions if item.finish_reason != "abort"]
    rows = [item.metrics for item in done]
    verifies = sum(row.verify_steps for row in rows)
    emitted = sum(row.emitted for row in rows)
    drafted = sum(row.drafted for row in rows)
    first_drafts, first_right = acceptance(done).first
    outputs = sum(row.output_tokens for row in rows)
    inputs = sum(row.prompt_tokens for row in rows)
    window = duration_s if duration_s > 0 else None

    def rate(amount: float) -> float | None:
        return amount / window if window else None

    numbers: dict[str, float | None] = {
        "requests": len(rows),
        "duration_s": duration_s,
        "input_tokens": inputs,
        "cached_tokens": sum(row.cached_tokens for row in rows),
        "output_tokens": outputs,
        "request_throughput": rate(len(rows)),
        "input_throughput": rate(inputs),
        "output_throughput": rate(outputs),
        "total_throughput": rate(inputs + outputs),
        "per_user_throughput": outputs / window / concurrency if window and concurrency else None,
        "accept_length": emitted / verifies if verifies else None,
        "accept_rate": sum(row.accepted for row in rows) / drafted if drafted else None,
        "first_draft_accept_rate": first_right / first_drafts if first_drafts else None,
        "verify_steps": verifies,
        "drafted_tokens": drafted,
        "accepted_tokens": sum(row.accepted for row in rows),
        "retractions": sum(row.retractions for row in rows),
    }
    numbers |= _spread("ttft_s", [row.ttft_s for row in rows if row.ttft_s is not None])
    numbers |= _spread("queue_s", [row.queue_s for row in rows])
    numbers |= _spread("tpot_s", [row.tpot_s for row in rows if row.tpot_s is not None])
    numbers |= _spread("itl_s", [gap for row in rows for gap in row.itl_s])
    numbers |= _spread("e2e_s", [row.e2e_s for row in rows])
    return numbers


def device_numbers(counters: dict[str, Any]) -> dict[str, float | None]:
    """What the counters of a run say of host and device."""
    steps, gaps, busy = counters["device_steps"], counters["device_gaps"], counters["device_s"]
    # Gaps are known for some of the steps; the others are taken to be like them.
    idle = counters["device_idle_s"] / gaps * steps if gaps else None
    graphs = counters["graphs"].values()
    replays = sum(item["replays"] for item in graphs)
    # "off" is no fallback: no graph was asked for.
    passes = replays + sum(count for item in graphs for why, count in item["fallbacks"].items() if why != "off")
    overlapped = counters["overlapped"]
    return {
        "device_step_s": busy / steps if steps else None,
        "step_time_s": _step_time(counters),
        "device_idle_share": idle / (idle + busy) if idle is not None else None,
        "launch_lead_s": counters["launch_lead_s"] / overlapped if overlapped else None,
        "late_launch_share": counters["late_launches"] / overlapped if overlapped else None,
        "host_waits_per_step": counters["host_waits"] / steps if steps else None,
        "graph_coverage": replays / passes if passes else None,
    }


def _step_time(counters: dict[str, Any]) -> float | None:
    steps, gaps, iterations = counters["device_steps"], counters["device_gaps"], counters["iterations"]
    if steps:
        return float(counters["device_s"] / steps + (counters["device_idle_s"] / gaps if gaps else 0.0))
    return float(counters["iteration_s"] / iterations) if iterations else None


def steps_at(counters: dict[str, Any], rows: int) -> tuple[int, float | None]:
    """The iterations that ran `rows` requests, and their step time in seconds; None if there were none."""
    steps, seconds = counters["steps_by_rows"].get(str(rows), (0, 0.0))
    return int(steps), seconds / steps if steps else None


def acceptance(completions: Iterable[Completion]) -> Acceptance:
    """Counts of all verifies by draft and by context; aborted requests count nowhere."""
    total = Acceptance()
    for item in completions:
        if item.finish_reason != "abort":
            total += item.metrics.acceptance
    return total


def emitted_histogram(completions: Iterable[Completion]) -> list[int]:
    """How many verifies left 0, 1, 2, ... tokens (index = tokens, bonus included); aborted requests count nowhere."""
    total: list[int] = []
    for item in completions:
        if item.finish_reason == "abort":
            continue
        counts = item.metrics.emitted_histogram
        total += [0] * (len(counts) - len(total))
        for place, count in enumerate(counts):
            total[place] += count
    return total


@dataclass
class RunRecord:
    """Everything needed to remake a table or to rerun what it shows. `workload` is filled in by the command."""

    config: dict[str, Any]
    caps: dict[str, Any]
    metrics: dict[str, float | None]
    counters: dict[str, Any]
    requests: list[dict[str, Any]]
    workload: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: versions())
    hardware: dict[str, Any] = field(default_factory=lambda: hardware())
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    schema: int = SCHEMA

    @property
    def gpu(self) -> str | None:
        """The GPU that ran it. None on a CPU, whatever else the machine has."""
        on_cpu = self.caps.get("device", self.config.get("device")) == "cpu"
        return None if on_cpu else self.hardware.get("gpu")

    @property
    def processor(self) -> str:
        """The part that a time depends on most: the GPU, or the CPU with its cores."""
        return self.gpu or f"{self.hardware.get('cpu')}, {self.hardware.get('cores')} cores"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """The record as JSON, without the raw rows."""
        body = self.as_dict()
        del body["requests"]
        return json.dumps(body, indent=2) + "\n"

    def save(self, folder: Path) -> None:
        """Write `record.json` (without the raw rows) and `requests.jsonl` into `folder`, each atomically."""
        write_atomic(folder / "requests.jsonl", "".join(json.dumps(row) + "\n" for row in self.requests))
        write_atomic(folder / "record.json", self.summary())

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        body = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        rows = folder / "requests.jsonl"
        text = rows.read_text(encoding="utf-8") if rows.exists() else ""
        body["requests"] = [json.loads(line) for line in text.splitlines()]
        return cls(**body)


def break_even(drafting: RunRecord, plain: Iterable[RunRecord]) -> float | None:
    """The accept length that `drafting` needs to be as fast as the fastest of `plain`; None where a time is missing.

    It is the time of its steps over that of as many plain ones, each with the same number of requests; of numbers that
    one of them never ran nothing is said.
    """
    steps = drafting.counters.get("steps_by_rows", {})
    found = []
    for record in plain:
        others = record.counters.get("steps_by_rows", {})
        shared = [rows for rows in steps if rows in others]
        took = sum(steps[rows][1] for rows in shared)
        plainly = sum(steps[rows][0] * others[rows][1] / others[rows][0] for rows in shared)
        if took and plainly:
            found.append(took / plainly)
    return max(found) if found else None


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the whole new one, never half."""
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def versions() -> dict[str, str]:
    """Versions of what a number depends on."""
    found = {"python": platform.python_version(), "specbatch": __version__}
    for name in ("torch", "triton", "transformers", "tokenizers", "lm_eval", "datasets"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, memory and, where torch is already loaded and sees one, the GPU."""
    import psutil

    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu": _cpu_name(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            found["gpu"] = properties.name
            found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
            found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
