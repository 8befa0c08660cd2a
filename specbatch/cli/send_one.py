"""`specbatch send-one`: answers one prompt and shows its latency, acceptance and speed."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from typer import Option

from specbatch.cli.options import SAMPLING_OPTIONS, EngineOptions, Json, takes_engine
from specbatch.cli.output import open_engine, show
from specbatch.errors import refuse


@takes_engine(
    without=("data_parallel",), defaults={"prefix_cache": "off", "max_running": "1"}, sampling=SAMPLING_OPTIONS
)
def send_one(
    engine: EngineOptions,
    sampling: dict[str, Any],
    prompt: Annotated[str | None, Option(help="The prompt. Default: some Python code.")] = None,
    max_new_tokens: Annotated[int, Option(help="Maximum number of tokens in the answer.")] = 128,
    stream: Annotated[bool, Option("--stream", help="Print the text as it is generated.")] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, and show latency, acceptance and speed.

    specbatch send-one

    specbatch send-one --spec v2 --prompt "def fibonacci(n):" --stream

    specbatch send-one --temperature 0.6 --top-p 0.95 --seed 3
    """
    from specbatch.core.sampling_params import SamplingParams, refuse_unsampled
    from specbatch.jobs.send_one import PROMPT, table
    from specbatch.jobs.send_one import send_one as send

    if prompt == "":
        raise refuse("prompt", prompt, "is empty; write at least one token of text")
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    refuse_unsampled(sampling)
    config = engine.config(concurrency=1, prefix_cache=False)
    with open_engine(config) as running:
        result = send(running, prompt or PROMPT, params, write=_write_through if stream else None)
    if stream and as_json:
        print()  # so that the JSON starts a new line
    show(f"{'' if stream else result['text']}\n\n{table(result)}", result, as_json=as_json)


def _write_through(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
