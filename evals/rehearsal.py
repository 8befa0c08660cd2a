"""Scores a user's tasks with made-up answers, so that what is wrong with their definition shows before a model is
loaded.

lm-eval computes filters and metrics when all answers are there. A metric that does not fit the type of the task, or a
filter that needs a column, would end the run then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from specbatch.errors import one_line, refuse
from specbatch.evals.selection import Chosen, asking

_QUESTIONS = 2
_ANSWER, _LOGPROB = "1", -1.0


class _Replies:
    """lm-eval's model, of which every answer is the same."""

    rank, world_size, tokenizer_name = 0, 1, ""

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        return [_ANSWER for _ in requests]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        return [(_LOGPROB, False) for _ in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return [_LOGPROB for _ in requests]


def rehearse(name: str, tasks: Mapping[str, Any], groups: Mapping[str, Any], chosen: Chosen) -> list[str]:
    """Score the first of the `chosen` questions of lm-eval's tasks and groups. Returns notes.

    name   what the errors are about
    Refused: definitions with which answers cannot be scored.
    """
    import lm_eval

    for one in tasks.values():
        if type(one.config.repeats) is not int or one.config.repeats < 1:
            raise refuse("task", name, f"repeats: {one.config.repeats!r} is no whole number of at least 1; correct it")
    few = {own: chosen[own][:_QUESTIONS] for own in tasks}
    of = {own: group.child_names for own, group in groups.items()}
    every = {"tasks": dict(tasks), "groups": dict(groups), "group_map": of}
    scores: Any = None
    try:
        with asking(tasks, few, lambda *_: None), suppress(ArithmeticError):
            scores = lm_eval.evaluate(_Replies(), every, bootstrap_iters=0, confirm_run_unsafe_code=True)
    except Exception as error:
        raise refuse("task", name, f"its answers cannot be scored ({one_line(error)}); correct it") from error
    if scores is None:  # of so few answers, such as a mean over none
        return []
    if not all(scores["samples"].values()):
        raise refuse("task", name, "filter_list is empty, so that nothing is scored; take it out, or name filters")
    computed = {own: {key.partition(",")[0] for key in of} for own, of in scores["results"].items()}
    notes = []
    for own, task in tasks.items() if not groups else ():
        missing = [metric for metric in task._aggregation_list if metric not in computed[own]]
        notes += [f"metric {metric} is not computed: {own} is of type {task.OUTPUT_TYPE}" for metric in missing]
    for own, group in groups.items():
        wanted = [item.metric for item in group.aggregate_metric_list or ()]
        missing = [metric for metric in wanted if metric not in computed.get(own, ())]
        notes += [f"group {own} has no {metric}: none of its tasks has this metric and filter" for metric in missing]
    return notes
