"""A note below a table, and how notes name points."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from specbatch.errors import counted, listed
from specbatch.records.run_record import RunRecord


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


def place_of(record: RunRecord) -> str:
    work = record.workload
    return f"{work['configuration']} at concurrency {work['concurrency']}, repeat {work['repeat']}"


def places_in_short(places: list[str]) -> str:
    first, *others = places
    return f"{first}, and {counted(len(others), 'other point')}" if others else first


def which(names: Collection[str], every: Collection[str]) -> str:
    """The names; shorter where they are most of `every`."""
    others = [name for name in every if name not in names]
    if len(names) > 2 and 2 * len(others) < len(names):
        return f"all but {listed(others)}" if others else "all"
    return listed(names)
