"""`specbatch models`: lists the known models and puts them into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from specbatch.cli.options import Json
from specbatch.cli.output import rows_table, say, show

models = typer.Typer(no_args_is_help=True, help="List the known models, or download one.")


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """Show the known models: size, quantization, accuracy on GSM8K, license, source, and whether each is in the cache.

    smollm2-135m is a small download (Q4_1) for first steps; it scores about 1.5% on GSM8K.

    Evaluate accuracy with the other models.
    """
    from specbatch.weights import known_models

    rows = known_models.rows()
    show(rows_table(rows, without="sha256"), {"models": rows}, as_json=as_json)


@models.command("pull")
def pull_model(
    name: Annotated[str, Argument(metavar="MODEL", help="For example smollm2-135m.")],
    copy: Annotated[
        Path | None, Option("--from", help="A local copy of the model's file to use instead of a download.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a known model into the user's cache, by download or from a local copy. Its sha256 is checked.

    specbatch models pull smollm2-135m

    specbatch models pull qwen2.5-coder-1.5b --from qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
    """
    from specbatch.weights import known_models

    path = known_models.pull(name, say, copy)
    show(str(path), {"name": name, "path": str(path)}, as_json=as_json, kept=str(path))
