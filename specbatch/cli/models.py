"""`specbatch models`: lists the bundled models and downloads them."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument

from specbatch.cli.options import Json
from specbatch.cli.output import rows_table, say, show

models = typer.Typer(no_args_is_help=True, help="List the bundled models, or download one.")


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """Show the bundled models: where each comes from, its size, licence and whether it is here already."""
    from specbatch.weights import bundled

    rows = bundled.rows()
    show(rows_table(rows, without="sha256"), {"models": rows}, as_json=as_json)


@models.command("pull")
def pull_model(name: Annotated[str, Argument(help="For example smollm2-135m.")], as_json: Json = False) -> None:
    """Download a bundled model into the user's cache, checked by its hash.

    specbatch models pull smollm2-135m
    """
    from specbatch.weights import bundled

    path = bundled.pull(name, say)
    show(str(path), {"name": name, "path": str(path)}, as_json=as_json)
