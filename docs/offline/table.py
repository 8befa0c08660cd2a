"""Tables of the offline points: python docs/offline/table.py FILE.jsonl"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ENGINES = ("specbatch", "SGLang", "vLLM")
Lines = dict[tuple[str, str, str], dict[str, Any]]  # by speculation, point and engine


def tables(text: str) -> str:
    """Markdown: output tokens per second with ratios to the better rival, then times and accept lengths."""
    found = [json.loads(line) for line in text.splitlines()]
    lines = {(line["speculation"], line["point"], line["engine"]): line for line in found}
    versions = {line["engine"]: f"{line['engine']} {line['version']}" for line in found}
    names = " | ".join(versions.get(engine, engine) for engine in ENGINES)
    kinds = dict.fromkeys(line["speculation"] for line in found)
    parts = [_throughput(kind, names, lines) for kind in kinds]
    parts += [_times(kind, lines) for kind in kinds]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _points(kind: str, lines: Lines) -> Iterator[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Name, what it is, and the lines of its engines."""
    for name in dict.fromkeys(point for speculation, point, _ in lines if speculation == kind):
        here = {engine: lines[kind, name, engine] for engine in ENGINES if (kind, name, engine) in lines}
        one = next(iter(here.values()))
        yield name, f"{one['requests']:,} x {one['tokens_in']:,} / {one['tokens_out']}", here


def _speed(line: dict[str, Any]) -> float:
    return float(line["output_tokens"] / line["wall_s"])


def _throughput(kind: str, names: str, lines: Lines) -> Iterator[str]:
    yield f"Output tokens per second, {'EAGLE-3' if kind == 'EAGLE-3' else 'no speculation'}:\n"
    yield f"| point | requests x in / out | {names} | specbatch / better rival |"
    yield "|---|---|---|---|---|---|"
    ratios = {}
    for name, what, here in _points(kind, lines):
        speeds = [f"{_speed(here[engine]):.1f}" if engine in here else "-" for engine in ENGINES]
        if len(here) == len(ENGINES):
            ratios[name] = _speed(here["specbatch"]) / max(_speed(here[engine]) for engine in ENGINES[1:])
        yield f"| {name} | {what} | {' | '.join(speeds)} | {f'{ratios[name]:.3f}' if name in ratios else '-'} |"
    if ratios:
        yield f"| geometric mean | of {len(ratios)} points | | | | {geometric_mean(ratios.values()):.3f} |"
    if "gsp" in ratios and len(ratios) > 1:
        others = [ratio for name, ratio in ratios.items() if name != "gsp"]
        yield f"| | of the {len(others)} without gsp | | | | {geometric_mean(others):.3f} |"


def _times(kind: str, lines: Lines) -> Iterator[str]:
    yield f"Seconds, {'EAGLE-3' if kind == 'EAGLE-3' else 'no speculation'}:\n"
    yield "| point | engine | wall (s) | mean TTFT (s) | mean TPOT (ms) | accept length |"
    yield "|---|---|---|---|---|---|"
    for name, _, here in _points(kind, lines):
        for engine, line in here.items():
            accepted = f"{line['accept_length']:.2f}" if kind == "EAGLE-3" else "-"
            times = f"{line['wall_s']:.2f} | {line['ttft_s']:.3f} | {1e3 * line['tpot_s']:.2f}"
            yield f"| {name} | {engine} | {times} | {accepted} |"


if __name__ == "__main__":
    print(tables(Path(sys.argv[1]).read_text(encoding="utf-8")), end="")
