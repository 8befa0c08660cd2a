"""The `specbatch` command. Each command parses, calls one function, prints."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Offline batch inference and evaluation for speculative decoding.")


def main() -> None:
    app()
