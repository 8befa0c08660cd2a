"""`specbatch eval`: scores a task's answers with lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from specbatch.cli.options import Concurrency, EngineOptions, Json, takes_engine
from specbatch.cli.output import fresh_folder, open_engine, say, show
from specbatch.errors import refuse
from specbatch.progress import progress

if TYPE_CHECKING:
    from specbatch.config import EngineConfig
    from specbatch.evals.run import EvalOptions


@takes_engine()
def evaluate(
    task: Annotated[str, Argument(help="one_digit_sums, gsm8k, gsm8k_platinum or another lm-eval task.")],
    engine: EngineOptions,
    limit: Annotated[int | None, Option(help="Only the first N questions.")] = None,
    num_fewshot: Annotated[
        int | None, Option(help="Worked examples before each question. Default: the task's.")
    ] = None,
    data: Annotated[Path | None, Option(help="JSONL of question and answer to be scored.")] = None,
    fewshot_data: Annotated[Path | None, Option(help="JSONL to take the worked examples from.")] = None,
    fewshot_seed: Annotated[int, Option(help="Of the choice of examples; 1234 is lm-eval's own.")] = 1234,
    chat_template: Annotated[bool, Option("--chat-template/--no-chat-template", help="Ask as a chat message.")] = False,
    thinking: Annotated[
        bool | None, Option("--thinking/--no-thinking", help="The chat template's enable_thinking. Default: its own.")
    ] = None,
    max_new_tokens: Annotated[int | None, Option(help="Longest answer. Default: the task's, else 512.")] = None,
    ladder: Annotated[
        bool, Option("--ladder", help="The same with nothing drafted, in v1, v2 and v2+piecewise, side by side.")
    ] = False,
    concurrency: Concurrency = None,
    output: Annotated[
        Path | None, Option("--output", "--out", help="New folder for the results. Default: out/eval-TIME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a task's questions, score them with lm-eval, and show acceptance and speed beside the score.

    specbatch eval one_digit_sums --limit 40

    specbatch eval gsm8k --data gsm8k_test.jsonl --limit 100 --spec v2

    specbatch eval gsm8k --data gsm8k_test.jsonl --ladder --algorithm eagle3 --draft HEAD

    specbatch eval one_digit_choices

    one_digit_sums and one_digit_choices need no network. Per-question results go to the output folder. What a model
    writes inside <think> is not scored.

    Tasks of type multiple_choice, loglikelihood and loglikelihood_rolling (arc_easy, lambada_openai, wikitext) ask how
    likely given texts are. The model says so alone, without drafts: --algorithm and --ladder are refused for them.
    """
    from specbatch.evals.run import PARTIAL, EvalOptions, prepare

    if ladder and engine.spec is not None:
        raise refuse("spec", engine.spec, "--ladder runs all of them; leave it out")
    config = (engine.having(spec="v2") if ladder else engine).config(concurrency=concurrency, compares=ladder)
    with fresh_folder(output, "eval") as folder:
        options = EvalOptions(
            task=task,
            limit=limit,
            num_fewshot=num_fewshot,
            data=data,
            fewshot_data=fewshot_data,
            chat_template=chat_template,
            thinking=thinking,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            seed=fewshot_seed,
            output=folder,
        )
        if ladder:
            _climb(config, options, folder, as_json)
            return
        ready = prepare(options)
        if engine.decode_graph == "whole" and not ready.task.generates:
            raise refuse("decode_graph", "whole", f"task {task} ({ready.task.kind}) decodes nothing; leave it out")
        with open_engine(ready.engine_config(config)) as running, progress(f"eval {task}") as report:
            try:
                result = ready.run(running, report)
            except KeyboardInterrupt:
                partial = folder / PARTIAL
                kept = partial.read_text().count("\n") if partial.exists() else 0
                if not kept:
                    partial.unlink(missing_ok=True)
                    raise
                raise KeyboardInterrupt(f"kept {kept} finished answers in {partial}") from None
    text = f"{result.table()}\n\nresults: {folder}"
    show(text, {**result.as_dict(), "output": str(folder)}, as_json=as_json)


def _climb(config: EngineConfig, options: EvalOptions, folder: Path, as_json: bool) -> None:
    from specbatch.engine.builder import find_device
    from specbatch.evals.ablation import run_ladder, rungs

    configs, left_out = rungs(config, find_device(config.device).type == "cuda")
    with progress(f"eval {options.task}") as report:
        found = run_ladder(configs, options, folder, left_out=left_out, log=say, progress=report)
    show(f"{found.table()}\n\nresults: {folder}", {**found.as_dict(), "output": str(folder)}, as_json=as_json)
