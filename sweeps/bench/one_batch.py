"""Prefill and decode of one static batch, in the lines of SGLang's bench_one_batch (0.5.23: benchmark/one_batch.py).

    Prefill. batch size: 1, input: 1024, latency: 0.50000 s, throughput:   2048.00 token/s
    Decode.  batch size: 8, input: 512, mean latency: 0.10000 s, throughput:     80.00 token/s

Prefill is the median time to first token of a request that runs alone (section ttft). Decode is the mean step of a full
batch (section decode), where SGLang has the median; with drafts a step emits several tokens. A batch of several prompts
at once, and the total of a run, are not measured by themselves, so they have no line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.points import points_of

_TTFT, _STEP, _SPEED = (METRICS[key] for key in ("median_ttft_s", "step_s", "decode_throughput"))


def one_batch(records: Mapping[str, list[RunRecord]]) -> str:
    """The lines of each configuration as one block of Markdown, from the records of a bench by section; empty where no
    such section was measured."""
    found: dict[str, list[str]] = {}
    for section, own in records.items():
        for name, line in _lines(section, own):
            found.setdefault(name, []).append(line)
    if not found:
        return ""
    blocks = "\n\n".join("\n".join([name, *lines]) for name, lines in found.items())
    return f"### As bench_one_batch prints it\n\n```\n{blocks}\n```\n"


def _lines(section: str, records: list[RunRecord]) -> Iterator[tuple[str, str]]:
    """Configuration and line of each point of a section."""
    for (size, name), repeats in points_of(records).items():
        length = repeats[0].workload["input_len"]
        if section.startswith("ttft") and (seconds := _TTFT.over_repeats(repeats)):
            speed = length / seconds
            point = f"Prefill. batch size: 1, input: {length}, latency: {seconds:6.5f} s"
            yield name, f"{point}, throughput: {speed:9.2f} token/s"
        elif section == "decode" and (seconds := _STEP.over_repeats(repeats)):
            speed = _SPEED.over_repeats(repeats) or 0.0
            point = f"Decode.  batch size: {size}, input: {length}, mean latency: {seconds:6.5f} s"
            yield name, f"{point}, throughput: {speed:9.2f} token/s"
