"""Answers one prompt with greedy decoding: a quick look at latency, acceptance and speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams, sampling_of, sampling_text
from specbatch.records.markdown import acceptance_table, draft_length_lines, markdown_table
from specbatch.records.run_record import speculation_of

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

PROMPT = '''def word_counts(text: str) -> dict[str, int]:
    """Count how often each word occurs in the text, ignoring case."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def letter_counts(text: str) -> dict[str, int]:
    """Count how often each letter occurs in the text, ignoring case."""
'''
HEADERS = {
    "latency_s": "Latency (s)",
    "tokens": "Tokens",
    "accept_length": "Acc Length",
    "speed": "Speed (token/s)",
}
WARM_UP_TOKENS = 8


def send_one(
    engine: InferenceEngine, prompt: str, params: SamplingParams, *, write: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Answer `prompt` once, after a short warm-up with the same prompt. `write` gets the text as it is generated.

    Returns latency_s (from submission to the last token), tokens, accept_length (1 if nothing was verified), speed
    (tokens per second of latency), text, finish_reason and the record of the run.
    """
    engine.generate([prompt], replace(params, max_new_tokens=min(params.max_new_tokens, WARM_UP_TOKENS)))
    engine.reset_record()
    completion = _stream(engine, prompt, params, write) if write else engine.generate([prompt], params)[0]
    metrics = completion.metrics
    workload = {"command": "send-one", "prompt": prompt, "sampling": sampling_of(params)}
    return {
        "latency_s": metrics.e2e_s,
        "tokens": metrics.output_tokens,
        "accept_length": 1.0 if metrics.accept_length is None else metrics.accept_length,
        "speed": metrics.output_tokens / metrics.e2e_s,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "record": engine.record(concurrency=1, workload=workload).as_dict(),
    }


def table(result: dict[str, Any]) -> str:
    row = [
        f"{result['latency_s']:.3f}",
        result["tokens"],
        f"{result['accept_length']:.3f}",
        f"{result['speed']:.2f}",
    ]
    shown = markdown_table([row], list(HEADERS.values()))
    speculation = speculation_of(result["record"]["config"]["speculation"])
    record = result["record"]
    parts = [
        shown,
        acceptance_table({(): [record["counters"]]}, sampling=sampling_text(record["workload"].get("sampling"))),
    ]
    parts.append("\n".join(draft_length_lines([record["counters"]], record["caps"])))
    parts += [] if speculation.simulated is None else [str(speculation)]
    return "\n\n".join(filter(None, parts))


def _stream(engine: InferenceEngine, prompt: str, params: SamplingParams, write: Callable[[str], None]) -> Completion:
    for event in engine.stream([prompt], params):
        write(event.text)
        if event.completion is not None:
            return event.completion
    raise AssertionError("a stream ends with a completion")
