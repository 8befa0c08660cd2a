"""The `specbatch` command: registers the commands and turns exceptions into exit statuses.

Each command parses its options, calls one function and prints the result. Nothing heavy is imported before a command
runs, so that `specbatch --help` is fast. A user's mistake is reported in one line on standard error with exit status 2;
Ctrl-C or SIGTERM reports what was kept and exits with status 130.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from specbatch import SpecbatchError, __version__
from specbatch.cli.acceptance import acceptance
from specbatch.cli.advise import advise
from specbatch.cli.bench import bench
from specbatch.cli.check import check
from specbatch.cli.compare import compare
from specbatch.cli.configs import Words
from specbatch.cli.doctor import doctor
from specbatch.cli.eval import evaluate
from specbatch.cli.gate import gate
from specbatch.cli.generate import generate
from specbatch.cli.help import Command
from specbatch.cli.lm_eval import PASSES_ON, lm_eval
from specbatch.cli.models import models
from specbatch.cli.options import bounded, is_given
from specbatch.cli.output import say
from specbatch.cli.report import report
from specbatch.cli.send_one import send_one
from specbatch.cli.sweep import sweep
from specbatch.cli.trace import trace
from specbatch.cli.train_draft import train_draft
from specbatch.config.field_errors import what_works
from specbatch.config.flags import flags_of, in_flags, no_argument
from specbatch.errors import WORDING, FailedError, refuse
from specbatch.files.atomic_file import UnwritableError

# The disk failed or is full: no mistake of the user, so the exit status is 1.
_WHILE_RUNNING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_UsageError: Any = typer.BadParameter.__mro__[1]  # Typer bundles Click or imports it, depending on its version


class Commands(TyperGroup):
    """Turns exceptions of a command into a line on standard error and an exit status."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _reported(lambda: (info_name, self)):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _reported(lambda: self._invoked(ctx)):
            return super().invoke(ctx)

    def _invoked(self, ctx: Any) -> tuple[str, Any]:
        """The command that runs, and how to call it."""
        name = ctx.invoked_subcommand
        return f"{ctx.command_path} {name}", self.get_command(ctx, name) if name else self


class Worded(Command):
    """A command whose messages name its flags."""

    def invoke(self, ctx: Any) -> Any:
        given = [item.name for item in self.params if is_given(ctx, item.name)]
        WORDING.set(Words(flags_of(self.params, given)))
        return super().invoke(ctx)


@contextmanager
def _reported(running: Callable[[], tuple[str | None, Any]]) -> Iterator[None]:
    """Report errors in one line, in the words of the command line. running: the command, and how it was called."""

    def worded(error: SpecbatchError) -> str:
        if isinstance(words := WORDING.get(), Words):
            return words.message(error)
        return in_flags(error, flags_of(running()[1].params))  # no command runs yet

    before = WORDING.set(WORDING.get())
    try:
        yield
    except SpecbatchError as error:
        say(f"error: {'; '.join(filter(None, [worded(error), error.kept]))}")
        raise typer.Exit(1 if isinstance(error, FailedError) else 2) from error
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help of a group of commands
            raise
        where, command = running()
        if error.ctx:
            where, command = error.ctx.command_path, error.ctx.command
        say(f"error: {_usage_error(error, command)} (see {where} --help)")
        raise typer.Exit(2) from error
    except BrokenPipeError:  # the reader of standard output has ended
        raise
    except OSError as error:
        say(f"error: {'; '.join([_one_line(error), *getattr(error, '__notes__', ())])}")
        raise typer.Exit(1 if error.errno in _WHILE_RUNNING else 2) from error
    except KeyboardInterrupt as stop:
        say("; ".join(["interrupted", *_kept(stop)]))
        raise typer.Exit(130) from stop
    finally:
        WORDING.reset(before)


def _usage_error(error: Any, command: Any) -> str:
    """Of a value that pydantic refuses Typer's own message has no value, and of a word that is no argument no option
    that takes it."""
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError):
        problems = error.__cause__.errors(include_url=False)
        refused = refuse(error.param.name, problems[0]["input"], what_works(problems[0], problems))
        return in_flags(refused, flags_of(command.params))
    if extra := re.search(r"unexpected extra arguments? ?\(?s?\)? \((.*)\)", error.format_message()):
        words = extra[1]
        return f"{words}: {no_argument(command, words)}"
    return " ".join(error.format_message().split()).rstrip(".")


def _kept(stop: BaseException | None) -> list[str]:
    """What an interruption says is kept. A second one, while the first is handled, does not know it."""
    while stop is not None:
        if isinstance(stop, KeyboardInterrupt) and stop.args:
            return list(map(str, stop.args))
        stop = stop.__context__
    return []


def _one_line(error: OSError) -> str:
    if isinstance(error, UnwritableError) or error.strerror is None:
        text = " ".join(str(error).split()) or type(error).__name__
    else:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if error.errno in _WHILE_RUNNING:
        return f"{text}; make room, or name another disk, and run the same command again"
    return f"{text}; name another path" if isinstance(error, UnwritableError) else text


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def specbatch(
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Offline batch inference and evaluation for speculative decoding.

    Evaluate a task with speculation:    specbatch eval gsm8k --spec v2

    Compare baseline, v1 and v2:         specbatch sweep --concurrency 1,8,32,128

    Choose a drafter for your prompts:   specbatch advise prompts.jsonl

    Write the report of a sweep:         specbatch report out/sweep-20260102-030405

    Compare outputs with the baseline's: specbatch check --spec v2

    Show what changed between two runs:  specbatch compare out/before out/after

    Check a run against a policy:        specbatch gate out/eval --policy gate.toml

    Run prompts from a file:             specbatch generate in.jsonl -o out.jsonl

    Benchmark the engine on this device: specbatch bench --model qwen3-8b --load-format dummy

    Train a draft head for a model:      specbatch train-draft --algorithm eagle3 --data in.jsonl

    Show what runs on this machine:      specbatch doctor
    """
    if version:
        print(f"specbatch {__version__}")
        raise typer.Exit


def _help(command: Callable[..., None]) -> str:
    """A command's docstring without the line breaks inside its prose, so that the terminal wraps it; short lines, such
    as those of an example, are kept."""
    paragraphs = inspect.getdoc(command).split("\n\n")  # type: ignore[union-attr]
    return "\n\n".join(text if len(text.split("\n")[0]) < 80 else text.replace("\n", " ") for text in paragraphs)


app.command("eval", cls=Worded, help=_help(evaluate))(bounded(evaluate))
for command in (
    check,
    sweep,
    advise,
    report,
    bench,
    trace,
    compare,
    acceptance,
    gate,
    train_draft,
    generate,
    send_one,
    doctor,
):
    app.command(command.__name__.replace("_", "-"), cls=Worded, help=_help(command))(bounded(command))
app.command("lm-eval", cls=Worded, help=_help(lm_eval), context_settings=PASSES_ON)(bounded(lm_eval))
app.add_typer(models, name="models")


def main() -> None:
    # Weights are loaded by several threads, whose temporary buffers would fragment GPU memory: by gigabytes for
    # Qwen3-Next-80B-A3B in FP8. torch reads this setting when it is imported.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # batch systems send it: ends like Ctrl-C
    app()
