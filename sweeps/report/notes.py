"""Notes below a table: plain facts, and warnings of a kind that readers can filter by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specbatch.records.run_record import RunRecord

ERRORS_SHOWN = 3


@dataclass(frozen=True)
class Note:
    """A sentence below a table.

    warning   the kind of warning, such as "NO REPLAYS"; "" for a fact that needs no attention
    advice    what the user may do about it
    """

    text: str
    warning: str = ""
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.warning}: {self.text}" if self.warning else self.text
        return f"{text}; {self.advice}" if self.advice else text

    @property
    def log_text(self) -> str:
        """As the log of a command has it, the advice on a line of its own."""
        text = f"{self.warning.lower()}: {self.text}"
        return f"{text}\n  {self.advice}" if self.advice else text


def replay_notes(record: RunRecord, where: str) -> Iterator[Note]:
    """CUDA graphs that were requested and never replayed."""
    for kind, mode in record.config["graphs"].items():
        if mode == "off":
            continue
        replays = {name: graph["replays"] for name, graph in record.graphs(kind).items()} or {kind: 0}
        for name, count in replays.items():
            if not count:
                yield Note(
                    f"{where}: {name.replace('_', ' ')} graphs were requested and none was replayed.", "NO REPLAYS"
                )


def failures(record: RunRecord) -> list[tuple[str, int]]:
    """The errors of a server with their counts, the most frequent first; beyond `ERRORS_SHOWN` they are summed up."""
    found = sorted(record.counters.get("errors", {}).items(), key=lambda item: -item[1])
    rest = sum(count for _, count in found[ERRORS_SHOWN:])
    return found[:ERRORS_SHOWN] + ([("other errors", rest)] if rest else [])
