"""The log-likelihoods of one question as a JSON row, with choices as text, not as indices."""

from __future__ import annotations

from typing import Any

from specbatch.evals.task import ROLLING


def likelihood_fields(task: Any, sample: dict[str, Any]) -> dict[str, Any]:
    """Fields for the sample of a question of lm-eval's `task`. Log-probabilities are natural logarithms.

    multiple_choice        choices, each with its text, logprob and is_greedy; the text of the target; and `picked`, the
                           text of the choice with the highest logprob, which decides the metric acc
    loglikelihood          logprob and is_greedy of the target
    loglikelihood_rolling  logprob of the text
    """
    found = [answers[0] for answers in sample["resps"]]
    if task.OUTPUT_TYPE == ROLLING:
        return {"logprob": found[0]}
    likelihoods = [{"logprob": logprob, "is_greedy": is_greedy} for logprob, is_greedy in found]
    if task.OUTPUT_TYPE == "loglikelihood":
        return likelihoods[0]
    texts = task.doc_to_choice(sample["doc"])
    # After the choices there may be as many unconditional log-likelihoods, for acc_mutual_info.
    choices = [{"text": text} | found for text, found in zip(texts, likelihoods, strict=False)]
    best = max(choices, key=lambda choice: choice["logprob"])
    fields = {"target": _named(sample["target"], texts), "choices": choices, "picked": best["text"]}
    if task.multiple_input:  # the choices are contexts, and the target is their common continuation
        gold = task.doc_to_text(sample["doc"])
        return fields | {"question": sample["target"], "target": _named(gold, texts)}
    return fields


def _named(target: Any, texts: list[str]) -> Any:
    """A target given by the indices of choices, as their texts."""
    if isinstance(target, list):
        return [_named(item, texts) for item in target]
    return texts[target] if isinstance(target, int) and 0 <= target < len(texts) else target
