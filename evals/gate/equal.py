"""Are all answers of a run those of the baseline, token for token? The rule `equal` of a policy. A server gives no
tokens: where one of the runs is of a server, texts are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from specbatch.errors import refuse
from specbatch.records.answers import EvalAnswers, unpaired

_SHOWN = 40  # characters of each text at the divergence
_TEXT, _TOKENS, _REASONING = "text", "token_ids", "reasoning"


@dataclass(frozen=True)
class Equality:
    """differing: questions with an answer that is not the baseline's; divergence: the first of them in words."""

    questions: int
    differing: list[int]
    divergence: str


def compare_answers(before: EvalAnswers, after: EvalAnswers) -> Equality:
    """Compare tokens, or in a task that scores texts their log-likelihoods. Refused: other questions, and answers
    without tokens."""
    for report in (before, after):
        if report.record.other_engine:
            works = f"lm-eval's files of {report.record.other_engine} have no token ids; leave [answers] out"
            raise refuse("equal", True, works)
    by_text = before.generates and (before.record.of_server or after.record.of_server)
    old, new = (_rows(report, by_text=by_text) for report in (before, after))
    if apart := sorted(key for key in {*old, *new} if _prompt(old.get(key)) != _prompt(new.get(key))):
        raise unpaired([question for question, _ in apart])
    pairs = [(old[key], new[key]) for key in sorted(old)]
    differing = [pair for pair in pairs if _value(pair[0], before) != _value(pair[1], after)]
    names = list(dict.fromkeys(row["doc_id"] for row, _ in differing))
    return Equality(len({row["doc_id"] for row, _ in pairs}), names, _divergence(*differing[0]) if differing else "")


def _rows(report: EvalAnswers, *, by_text: bool) -> dict[tuple[int, int], dict[str, Any]]:
    """The answers by question and repeat; by_text: without their tokens."""
    if by_text:
        kept = [{name: value for name, value in row.items() if name != _TOKENS} for row in report.questions]
        return {(row["doc_id"], row.get("repeat", 0)): row for row in kept}
    if report.generates and (lacking := next((row for row in report.questions if _TOKENS not in row), None)):
        works = f"its answer to question {lacking['doc_id']} has no {_TOKENS}; run specbatch eval again"
        raise refuse("equal", True, works)
    return {(row["doc_id"], row.get("repeat", 0)): row for row in report.questions}


def _prompt(row: dict[str, Any] | None) -> str | None:
    return None if row is None else row["prompt_hash"]


def _value(row: dict[str, Any], report: EvalAnswers) -> Any:
    if not report.generates:
        return row
    return row[_TOKENS] if _TOKENS in row else (row.get(_REASONING), row.get(_TEXT))


def _divergence(before: dict[str, Any], after: dict[str, Any]) -> str:
    place = f"first divergence: question {before['doc_id']}"
    if _TEXT in before and _TOKENS not in before:
        return f"{place}, {_texts(before, after)}"
    if _TOKENS not in before:
        names = [name for name in before if before[name] != after.get(name)]
        return f"{place}, {', '.join(f'{name} {before[name]!r} -> {after.get(name)!r}' for name in names)}"
    old, new = before[_TOKENS], after[_TOKENS]
    at = _common(old, new)
    tokens = " -> ".join("the end" if at == len(found) else str(found[at]) for found in (old, new))
    return f"{place}, token {at} of {len(old)}: {tokens}; {_texts(before, after)}"


def _texts(before: dict[str, Any], after: dict[str, Any]) -> str:
    texts = [row.get(_REASONING, "") + row.get(_TEXT, "") for row in (before, after)]
    start = _common(*texts)
    return "text from there: " + " -> ".join(repr(text[start : start + _SHOWN]) for text in texts)


def _common(before: Sequence[Any], after: Sequence[Any]) -> int:
    """The length of the prefix that both have."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
