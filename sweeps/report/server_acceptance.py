"""Acceptance by draft position as servers of other engines count it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbatch.records.markdown import markdown_table, sum_lists
from specbatch.records.run_record import RunRecord

HEADINGS = ("verifies with drafts", "reached draft 1, 2, ... (%), untrimmed")


def server_acceptance(points: Mapping[tuple[Any, ...], Sequence[RunRecord]], names: Sequence[str]) -> str:
    """Markdown: one row for each point, after the parts of its key, whose headings are `names`; empty without any.

    Drafts after a stop or the limit count here, which the table of this engine's acceptance leaves out, and verifies
    without drafts do not.
    """
    body = []
    for point, repeats in points.items():
        counted = [found for record in repeats if (found := record.counters.get("server_acceptance"))]
        verifies = sum(found["verifies"] for found in counted)
        if verifies:
            accepted = sum_lists(found["accepted"] for found in counted)
            body.append([*point, str(verifies), " ".join(f"{100 * count / verifies:.0f}" for count in accepted)])
    title = "Acceptance by the servers' own counts:\n\n"
    return f"{title}{markdown_table(body, [*names, *HEADINGS])}\n" if body else ""
