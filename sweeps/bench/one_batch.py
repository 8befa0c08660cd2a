"""Prefill and decode of one static batch, in the lines of SGLang's bench_one_batch (0.5.23: benchmark/one_batch.py).

    Prefill. latency: 0.43751 s, throughput:  18724.34 token/s
    Decode.  median latency: 0.01206 s, median throughput:   2653.56 token/s
    Total. latency:  0.812 s, throughput:  11351.80 token/s

Of section onebatch, whose prompts all arrive at once: prefill ends with the first token of the last one, decode is the
median time between the tokens of a request (of a configuration that drafts, a step emits several), and the total counts
tokens of prompts and answers. Prompts of more than prefill_chunk tokens together take several passes, between which
others decode; theirs count in the latency of the prefill, and the first line says how many. SGLang's runs one pass,
without a scheduler.

Of the other sections: prefill is the median time to first token of a request that runs alone (section ttft), and decode
the mean step of a full batch (section decode).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.heading import made_up
from specbatch.sweeps.report.points import points_of

_TTFT, _STEP, _SPEED = (METRICS[key] for key in ("median_ttft_s", "step_s", "decode_throughput"))
_PREFILL, _DECODE, _TOTAL = (METRICS[key] for key in ("max_ttft_s", "median_itl_s", "duration_s"))


def one_batch(records: Mapping[str, list[RunRecord]]) -> str:
    """The lines of each configuration as one block of Markdown, from the records of a bench by section; empty where no
    such section was measured."""
    found: dict[str, list[str]] = {}
    for section, own in records.items():
        for name, line in _lines(section, own):
            found.setdefault(name, []).append(line)
    if not found:
        return ""
    unreal = made_up([record for own in records.values() for record in own])
    blocks = "\n\n".join("\n".join([name, *lines]) for name, lines in found.items())
    return f"### As bench_one_batch prints it{f' ({unreal})' if unreal else ''}\n\n```\n{blocks}\n```\n"


def _lines(section: str, records: list[RunRecord]) -> Iterator[tuple[str, str]]:
    """Configuration and line of each point of a section."""
    for (size, name), repeats in points_of(records).items():
        length = repeats[0].workload["input_len"]
        if section.startswith("onebatch"):
            for line in _batch(size, length, repeats):
                yield name, line
        elif section.startswith("ttft") and (seconds := _TTFT.over_repeats(repeats)):
            speed = length / seconds
            point = f"Prefill. batch size: 1, input: {length}, latency: {seconds:6.5f} s"
            yield name, f"{point}, throughput: {speed:9.2f} token/s"
        elif section == "decode" and (seconds := _STEP.over_repeats(repeats)):
            speed = _SPEED.over_repeats(repeats) or 0.0
            point = f"Decode.  batch size: {size}, input: {length}, mean latency: {seconds:6.5f} s"
            yield name, f"{point}, throughput: {speed:9.2f} token/s"


def _batch(size: int, length: int, repeats: list[RunRecord]) -> Iterator[str]:
    """The lines of a batch that was measured; without one for decoding if answers have a single token."""
    output, chunk = repeats[0].workload["output_len"], repeats[0].caps.get("prefill_chunk")
    prefill, decode, total = (metric.over_repeats(repeats) for metric in (_PREFILL, _DECODE, _TOTAL))
    if prefill is None or total is None:
        return
    passes = -(-size * length // (chunk * repeats[0].config.get("data_parallel", 1))) if chunk else 1
    several = f", {passes} or more passes of at most {chunk} tokens" if passes > 1 else ""
    yield f"Batch size: {size}, input: {length}, output: {output}{several}"
    yield f"Prefill. latency: {prefill:6.5f} s, throughput: {size * length / prefill:9.2f} token/s"
    if decode is not None:
        yield f"Decode.  median latency: {decode:6.5f} s, median throughput: {size / decode:9.2f} token/s"
    yield f"Total. latency: {total:6.3f} s, throughput: {size * (length + output) / total:9.2f} token/s"
