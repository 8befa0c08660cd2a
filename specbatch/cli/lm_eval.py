"""`specbatch lm-eval`: lm-eval's own command, which finds this engine as `--model specbatch`."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from specbatch.cli.output import say
from specbatch.errors import SpecbatchError

if TYPE_CHECKING:
    from specbatch.records.run_record import RunRecord

# Typer's settings of this command: `run --help` is lm-eval's help, too.
PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def lm_eval(
    arguments: Annotated[
        list[str], Argument(metavar="ARGUMENTS...", help="As for lm_eval; `specbatch lm-eval run --help` lists them.")
    ],
) -> None:
    """Run lm-eval's command with this engine as a model.

    specbatch lm-eval --model specbatch --model_args pretrained=qwen2.5-coder-1.5b,spec=v2 --tasks gsm8k_platinum

    The arguments are those of lm_eval, and so are tasks, tables and files. --model_args takes the options of specbatch
    commands by name (spec=v2, algorithm=eagle3, draft=HEAD, dtype=bfloat16, max_running=64), and num_concurrent,
    max_gen_toks, add_bos_token, enable_thinking, think_end_token and truncation, as lm-eval's models have them. Accept
    length and throughput follow the table.

    lm-eval downloads its tasks from the hub, except GSM8K and GSM8K-Platinum, whose rows come from this package.
    """
    from lm_eval.__main__ import cli_evaluate
    from yaml import YAMLError

    from specbatch.cli.lm_eval_model import SpecBatchModel
    from specbatch.evals.rows import GivenRows

    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        with SpecBatchModel.built() as models, GivenRows(None, None).answering_for_the_hub():
            try:
                cli_evaluate()
            except (AssertionError, KeyError, TypeError, ValueError, YAMLError) as error:
                # lm-eval raises them for its arguments. One that passed through this package is no such error.
                _, *places = traceback.walk_tb(error.__traceback__)
                if any(frame.f_globals["__name__"].startswith("specbatch.") for frame, _ in places):
                    raise
                text, (frame, number) = " ".join(_text(error).split()), places[-1]
                # Python of a task runs when there is a model.
                where = f" ({frame.f_code.co_filename}, line {number})" if models else ""
                raise SpecbatchError(f"lm-eval: {text}{where}") from error
            for model in models:
                for line in model.notes:
                    say(f"note: {line}")
                print(_speed(model.record()))
    finally:
        sys.argv = before


def _text(error: Exception) -> str:
    """What an error says, of a KeyError without quotes."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__


def _speed(record: RunRecord) -> str:
    """The speed of all requests of the run, as the table of `eval` has it."""
    from specbatch.evals.report import GENERATING, SCORING, cells_of
    from specbatch.records.markdown import markdown_table

    cells = cells_of(record, GENERATING if record.metrics.get("output_tokens") else SCORING)
    return markdown_table([{"requests": f"{record.metrics.get('requests') or 0:.0f}", **cells}])
