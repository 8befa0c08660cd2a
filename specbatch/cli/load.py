"""What `sweep` is told of its load: lengths, and a server in the place of our engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from specbatch.cli.options import EngineOptions
from specbatch.cli.output import say
from specbatch.errors import at_least, refuse

if TYPE_CHECKING:
    from specbatch.sweeps.run.http_engine import HttpEngine

OF_BOTH = ("model", "tokenizer", "seed")  # options of an engine that mean something for a server, too
OF_SERVERS = ("base_url", "send", "api_key_env")


def length(setting: str, text: str) -> int | tuple[int, int]:
    """128, or the fewest and the most: 64-256."""
    if found := re.fullmatch(r"(\d+)-(\d+)", text):
        return int(found[1]), int(found[2])
    return whole_number(setting, text, "the fewest and the most: 64-256")


def whole_number(setting: str, text: str, other: str) -> int:
    """`other`: what is allowed in place of a number."""
    try:
        value = int(text)
    except ValueError:
        raise refuse(setting, text, f"use a whole number of at least 1, or {other}") from None
    at_least(setting, value, 1)
    return value


def server_of(engine: EngineOptions, values: Mapping[str, Any], given: Callable[[str], bool]) -> HttpEngine | None:
    """The server of --engine http; None for our own engine. `values`: of the command's options; `given`: does the user
    say so? Refused: options of the other kind of engine."""
    kind = values["engine_kind"]
    if kind not in ("specbatch", "http"):
        raise refuse("engine", kind, "use specbatch, or http with --base-url")
    if kind == "specbatch":
        for name in filter(given, OF_SERVERS):
            raise refuse(name, values[name], "is of servers; add --engine http")
        return None
    from specbatch.sweeps.run.http_engine import HttpEngine, Server

    for name in filter(given, ("configs", *(item.name for item in fields(EngineOptions)))):
        if name not in OF_BOTH:
            works = "is a setting of our engine; the server has its own, so start it with what you want"
            raise refuse(name, values[name], works)
    model = engine.model if given("model") else None
    key = values["api_key_env"]
    return HttpEngine(Server(values["base_url"] or "", model, engine.tokenizer, values["send"], key), log=say)
