"""The prompts of an lm-eval task, as the workload of a benchmark or the training data of a draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbatch.errors import refuse
from specbatch.evals.lm_eval_process import quiet
from specbatch.evals.task import GENERATING, load_task
from specbatch.jobs.prompts import Prompt


def task_prompts(
    name: str, data: Path | None, *, as_messages: bool, num_fewshot: int | None = None
) -> tuple[list[Prompt], tuple[str, ...]]:
    """All prompts of an lm-eval task, and the stop strings of answers.

    num_fewshot   examples before each question; None: the task's number
    as_messages   conversations with one turn per example, instead of plain text; an error for tasks that write the
                  beginning of the answer themselves
    """
    loaded = load_task(name, num_fewshot=num_fewshot, data=data, kinds=[GENERATING])
    if loaded.is_group:
        raise refuse("dataset", f"lm-eval:{name}", f"is a group; name one of its tasks: {', '.join(loaded.tasks)}")
    task = loaded.task

    def rendered(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            works = f"task {name} writes the beginning of the answer itself; use chat_template=False"
            raise refuse("chat_template", True, works)
        return json.dumps(messages)

    with quiet():
        task.build_all_requests(
            rank=0,
            world_size=1,
            apply_chat_template=as_messages,
            fewshot_as_multiturn=as_messages,
            chat_template=rendered if as_messages else None,
        )
    requests: list[tuple[str, dict[str, Any]]] = [request.args for request in task.instances]
    if as_messages:
        prompts = [Prompt(number, "messages", json.loads(text)) for number, (text, _) in enumerate(requests, start=1)]
    else:
        prompts = [Prompt(number, "prompt", text) for number, (text, _) in enumerate(requests, start=1)]
    until = requests[0][1].get("until", [])
    return prompts, tuple(text for text in ([until] if isinstance(until, str) else until) if text)
