"""`specbatch send-one`: answers one prompt and shows its latency, acceptance and speed."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Option

from specbatch.cli.options import EngineOptions, Json, takes_engine
from specbatch.cli.output import open_engine, show
from specbatch.errors import refuse


@takes_engine()
def send_one(
    engine: EngineOptions,
    prompt: Annotated[str | None, Option(help="Your own prompt. Default: a fixed piece of code.")] = None,
    max_new_tokens: Annotated[int, Option(help="Longest answer.")] = 128,
    stream: Annotated[bool, Option("--stream", help="Print the text as it arrives.")] = False,
    as_json: Json = False,
) -> None:
    """Send one prompt, greedy, and show its latency, acceptance and speed.

    specbatch send-one

    specbatch send-one --spec v2 --prompt "def fibonacci(n):" --stream
    """
    from specbatch.core.request import SamplingParams
    from specbatch.jobs.send_one import PROMPT, table
    from specbatch.jobs.send_one import send_one as send

    if prompt == "":
        raise refuse("prompt", prompt, "is empty; write at least one token of text")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    config = engine.config(concurrency=1, prefix_cache=False)
    with open_engine(config) as running:
        result = send(running, prompt or PROMPT, params, write=_write_through if stream else None)
    if stream and as_json:
        print()  # the JSON is a line of its own
    show(f"{'' if stream else result['text']}\n\n{table(result)}", result, as_json=as_json)


def _write_through(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
