"""Runs a command line of specbatch in this process, with room for its tables."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from specbatch.cli.app import app


def call(*words: object, exit_code: int = 0) -> Result:
    """Its result; an exception that it does not report is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "1000"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result
