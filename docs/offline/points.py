"""What the offline comparison of three engines measures: points, prompts and one line of JSON per point."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean


@dataclass(frozen=True)
class Point:
    """Requests that are submitted at once, with random prompts and answers of a forced length."""

    requests: int
    tokens_in: int
    tokens_out: int
    shared: int = 0  # tokens before them that all prompts have, cached before the measurement


POINTS = {
    "d32k": Point(8, 32_768, 256),
    "d8k": Point(32, 8192, 256),
    "p256": Point(256, 512, 128),
    "p512": Point(512, 512, 128),
    "p1024": Point(1024, 512, 128),
    "g256": Point(256, 128, 512),
    "g512": Point(512, 128, 512),
    "gsp": Point(128, 128, 256, shared=2048),
    "g1024": Point(1024, 128, 512),
}
MOST_TOKENS = 33_280  # of a request: d32k needs 33,024
MOST_REQUESTS = 1024
RATES = (1.0, 0.4, 0.0)  # with EAGLE-3: shares of first, second and third drafts that are accepted, 2.4 tokens a verify


@dataclass(frozen=True)
class Run:
    """What an engine measured: means over requests, times from submission. Accept lengths are as the engine counts."""

    wall_s: float
    output_tokens: int
    ttft_s: float
    tpot_s: float
    accept_length: float | None = None


Prompts = list[list[int]]


def arguments(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--draft", help="folder of an EAGLE-3 head; without it nothing is drafted")
    parser.add_argument("--load-format", default="dummy", help="dummy (random weights, needs config.json only) or auto")
    parser.add_argument("--points", default=",".join(POINTS), help="default: all")
    parser.add_argument("--divide", type=int, default=1, help="requests and tokens by this number, for a try")
    parser.add_argument("--largest-id", type=int, default=150_000, help="of the random tokens of prompts")
    parser.add_argument("--output", type=Path, required=True, help="a line of JSON per point is appended")
    return parser.parse_args()


def token_times(first_s: list[float], last_s: list[float], tokens: list[int]) -> tuple[float, float]:
    """Mean TTFT and TPOT of requests, from the seconds after submission of their first and last tokens."""
    each = zip(first_s, last_s, tokens, strict=True)
    return mean(first_s), mean((last - first) / max(count - 1, 1) for first, last, count in each)


def measure(
    engine: str,
    version: str,
    args: argparse.Namespace,
    generate: Callable[[Prompts, int], Run],
    forget: Callable[[], object],
) -> None:
    """Run all points once after a warm-up of the same shape. `forget` empties the prefix cache."""
    draw = random.Random(1234)

    def ids(count: int) -> list[int]:
        return [draw.randrange(args.largest_id // 150, args.largest_id) for _ in range(count)]

    for name in args.points.split(","):
        point = Point(*(-(-number // args.divide) for number in asdict(POINTS[name]).values()))
        for tokens_out in (min(8, point.tokens_out), point.tokens_out):
            forget()
            shared = ids(point.shared)
            if shared:
                generate([shared + ids(point.tokens_in)], 4)
            run = generate([shared + ids(point.tokens_in) for _ in range(point.requests)], tokens_out)
        assert run.output_tokens == point.requests * point.tokens_out, run
        speculation = "EAGLE-3" if args.draft else "none"
        what = {"engine": engine, "version": version, "speculation": speculation, "point": name}
        sizes = {"requests": point.requests, "tokens_in": point.shared + point.tokens_in}
        text = json.dumps(what | sizes | {"tokens_out": point.tokens_out} | asdict(run))
        print(text, flush=True)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
