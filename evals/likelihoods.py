"""What a model said of the texts of one question, as a row for people: choices by name, not by number."""

from __future__ import annotations

from typing import Any

from specbatch.evals.task import ROLLING, EvalTask


def said_of(task: EvalTask, sample: dict[str, Any]) -> dict[str, Any]:
    """From lm-eval's sample of a question that was scored by log-likelihoods (natural logarithm).

    multiple_choice        choices, each with its text, logprob and is_greedy; the target's text, and `picked`: that of
                           the choice with the highest logprob, by which the metric acc goes
    loglikelihood          logprob and is_greedy of the target
    loglikelihood_rolling  logprob of the text
    """
    found = [answers[0] for answers in sample["resps"]]
    if task.kind == ROLLING:
        return {"logprob": found[0]}
    likelihoods = [{"logprob": logprob, "is_greedy": is_greedy} for logprob, is_greedy in found]
    if task.kind == "loglikelihood":
        return likelihoods[0]
    texts = task.task.doc_to_choice(sample["doc"])
    # Behind those of the choices there may be as many without the question, for acc_mutual_info.
    choices = [{"text": text} | said for text, said in zip(texts, likelihoods, strict=False)]
    best = max(choices, key=lambda choice: choice["logprob"])
    said = {"target": _named(sample["target"], texts), "choices": choices, "picked": best["text"]}
    if task.task.multiple_input:  # choices are beginnings here, and what they are to be continued with is the target
        gold = task.task.doc_to_text(sample["doc"])
        return said | {"question": sample["target"], "target": _named(gold, texts)}
    return said


def _named(target: Any, texts: list[str]) -> Any:
    """The texts of choices that are given by their places."""
    if isinstance(target, list):
        return [_named(item, texts) for item in target]
    return texts[target] if isinstance(target, int) and 0 <= target < len(texts) else target
