"""Options of an evaluation beside its tasks: refuses those without an effect, and applies `gen_kwargs`."""

from __future__ import annotations

from collections.abc import Sequence

from specbatch.errors import refuse
from specbatch.evals.generation import generation_of, parsed
from specbatch.evals.lm_eval_process import quiet
from specbatch.evals.options import EvalOptions
from specbatch.evals.task import GENERATING, ROLLING, EvalTask


def refuse_unused(options: EvalOptions, tasks: Sequence[EvalTask]) -> None:
    """Reject options that would have no effect on any of the tasks."""
    every = [one for task in tasks for one in task.tasks.values()]
    if options.samples is not None:
        known = [one.task_name for one in every]
        for name in options.samples:
            if name not in known:
                works = f"is no task of this run; use {', '.join(known[:8])}" + (" ..." if len(known) > 8 else "")
                raise refuse("samples", name, works)
    for task in tasks:
        for name, numbers in task.chosen(options).items():
            size = task.sizes[name]
            if options.samples is not None and name in options.samples and numbers[-1] >= size:
                raise refuse("samples", numbers[-1], f"task {name} has questions 0 to {size - 1}")
            if not numbers:
                raise refuse("offset", options.offset, f"task {name} has {size} questions; use at most {size - 1}")
    kinds = {str(one.OUTPUT_TYPE) for one in every}
    if GENERATING in kinds:
        return
    unused = ["max_new_tokens", "gen_kwargs", "truncate_prompts", "think_end_token"]
    if kinds == {ROLLING}:
        unused += ["chat_template", "num_fewshot", "system_instruction"]  # the texts are scored unchanged
    for setting, value in [(name, getattr(options, name)) for name in unused] + [*options.sampling.items()]:
        if value or setting in options.sampling:
            works = f"task {tasks[0].name} ({tasks[0].kind}) scores given texts and ignores it; leave it out"
            raise refuse(setting, value, works)


def apply_arguments(options: EvalOptions, task: EvalTask) -> None:
    """Update the generation arguments of the tasks with `gen_kwargs`, as lm-eval does, and refuse those that the engine
    does not support."""
    changes = {} if options.gen_kwargs is None else parsed(options.gen_kwargs)
    with quiet():
        for name, one in task.tasks.items():
            if one.OUTPUT_TYPE == GENERATING:
                one.set_config(key="generation_kwargs", value=changes, update=True)
                wanted = one.config.generation_kwargs
                generation_of(wanted, ("task", name), options.sampling, options.max_new_tokens)
