"""--compare-thinking of `sweep` and `eval`: thinking on and off in one table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from typer import Option

from specbatch.errors import refuse
from specbatch.servers.server import Server
from specbatch.sweeps.workload.settings import TEMPLATE

CompareThinking = Annotated[
    bool,
    Option(
        "--compare-thinking",
        help="Measure with thinking on and with thinking off, in one table.",
        rich_help_panel=TEMPLATE,
    ),
]


def check_compared(thinking: bool | None, models: Iterable[str], servers: Iterable[Server]) -> None:
    """Refuse what cannot be measured in both modes: a fixed mode, several models, and servers that render messages,
    whose prompts this client does not know."""
    if thinking is not None:
        raise refuse("thinking", thinking, "--compare-thinking measures both; leave one of them out")
    if len(names := list(models)) > 1:
        raise refuse("compare_thinking", True, f"takes one model, not {', '.join(names)}; run it for each")
    if any(server.send == "chat" for server in servers):
        raise refuse("send", "chat", "--compare-thinking renders the prompts itself; use ids or text")
