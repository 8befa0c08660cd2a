"""Markdown of a run that several commands print: the table of acceptance, the notes on draft lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from specbatch.errors import counted
from specbatch.records.metrics import ACCEPTANCE

DENOMINATORS = (
    '"Reached draft j" is a share of the verifies that drafted at least j tokens: those without drafts, or with fewer, '
    'are not counted. "Emitted" is a share of all verifies.'
)


def markdown_table(rows: Iterable[Any], headers: Sequence[str] | str = "keys") -> str:
    """Rows (dicts, or lists under `headers`) as a Markdown table, with cells as they are."""
    from tabulate import tabulate

    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def acceptance_cells(runs: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """A row of the acceptance table from the counters of one or more runs of a configuration; None without drafts."""
    found = [counters for counters in runs if "acceptance" in counters]
    drafted, tried, accepted = (
        sum_lists(counters["acceptance"][name] for counters in found) for name in ("drafted", "tried", "accepted")
    )
    if not any(drafted):
        return None
    emitted = sum_lists(counters["emitted_histogram"] for counters in found)
    contexts: dict[int, list[int]] = {}
    for start, *amounts in (bucket for counters in found for bucket in counters["acceptance"]["context"]):
        contexts[start] = sum_lists([contexts.get(start, []), amounts])
    return [
        str(sum(emitted)),
        _percents(accepted, drafted),
        _percents(accepted, tried),
        _percents(emitted[1:], [sum(emitted)] * (len(emitted) - 1)),
        ", ".join(f"{start}+: {tokens / count:.2f}" for start, (count, tokens) in sorted(contexts.items())),
    ]


def acceptance_table(
    rows: Mapping[tuple[Any, ...], Iterable[Mapping[str, Any]]], names: tuple[str, ...] = (), sampling: str = ""
) -> str:
    """Markdown: one row of `acceptance_cells` for each key, after the parts of the key, whose headings are `names`; how
    tokens were sampled above them, which verifies a column counts below. Empty where nothing was drafted."""
    known = {key: list(runs) for key, runs in rows.items()}
    body = [[*key, *cells] for key, runs in known.items() if (cells := acceptance_cells(runs))]
    if not body:
        return ""
    title = f"Acceptance, {sampling}:" if sampling else ""
    parts = title, markdown_table(body, [*names, *ACCEPTANCE]), denominators_note(chain(*known.values()))
    return "\n\n".join(filter(None, parts))


def denominators_note(runs: Iterable[Mapping[str, Any]]) -> str:
    """Which verifies the columns of an acceptance table count; "" where all had the same number of drafts."""
    for counters in runs:
        drafted = counters.get("acceptance", {}).get("drafted", ())
        if any(drafted) and {*drafted} != {sum(counters["emitted_histogram"])}:
            return DENOMINATORS
    return ""


def draft_length_lines(runs: Iterable[Mapping[str, Any]], caps: Mapping[str, Any]) -> list[str]:
    """How often each draft length or verify budget was chosen, from the counters of one or more runs of a
    configuration, and its caps.

    One line for each batch bucket with at least a twentieth of the steps, and of draft lengths where contexts had
    several powers of two one for each of these; none where both were fixed.
    """
    runs = list(runs)
    return [*_length_lines(runs, caps), *_budget_lines(runs, caps)]


def _budget_lines(runs: Iterable[Mapping[str, Any]], caps: Mapping[str, Any]) -> Iterator[str]:
    steps: dict[str, Counter[str]] = {}
    for counters in runs:
        for bucket, found in counters.get("verify_budgets", {}).items():
            steps.setdefault(bucket, Counter()).update(found)
    total = sum(found.total() for found in steps.values())
    for bucket, found in sorted(steps.items(), key=lambda item: int(item[0])):
        if 20 * found.total() >= total:
            shares = ", ".join(f"{rows} in {count / found.total():.0%}" for rows, count in found.most_common())
            times = _times(caps["verify_budget_s"][bucket])
            steps_text = counted(found.total(), "step")
            yield f"batch {bucket}: rows verified per request {shares} of {steps_text} (ms at start with {times})"


def _times(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {1000 * s:.2f}" for name, s in seconds.items())


def _length_lines(runs: Iterable[Mapping[str, Any]], caps: Mapping[str, Any]) -> list[str]:
    steps: dict[str, dict[str, Counter[str]]] = {}
    for counters in runs:
        contexts = counters.get("draft_lengths_by_context")
        for bucket, found in counters.get("draft_lengths", {}).items():
            known = steps.setdefault(bucket, {})
            for context, of_context in (contexts[bucket] if contexts else {"": found}).items():
                known.setdefault(context, Counter()).update(of_context)
    total = sum(found.total() for known in steps.values() for found in known.values())
    lines = []
    for bucket, known in sorted(steps.items(), key=lambda item: int(item[0])):
        shown = {context: found for context, found in known.items() if 20 * found.total() >= total}
        for context, found in sorted(shown.items(), key=lambda item: int(item[0] or 0)):
            times = _times(caps["draft_length_s"][bucket])
            where = f" after {context} tokens or more" if len(known) > 1 else ""
            shares = ", ".join(f"{length} in {count / found.total():.0%}" for length, count in found.most_common())
            steps_text = counted(found.total(), "step")
            lines.append(f"batch {bucket}{where}: drafted {shares} of {steps_text} (ms at start with {times})")
    return lines


def sum_lists(lists: Iterable[list[int]]) -> list[int]:
    """Elementwise sum of lists of any lengths."""
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _percents(counts: list[int], of: list[int]) -> str:
    return " ".join(f"{100 * count / whole:.0f}" if whole else "-" for count, whole in zip(counts, of, strict=True))
