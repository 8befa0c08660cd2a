"""Where drafts are accepted: counts of verifies, what tables show of them, and a warning where they hardly ever are.

What the shares mean is said in `specbatch.records.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.core.request import Completion

    Look = Callable[[Sequence[Completion]], str]

LOW = 0.2  # of the first drafts accepted
ENOUGH = 200  # verifies with a draft, before anything is said of it
TITLES = (
    "verifies",
    "reached draft 1, 2, ... (%)",
    "accepted where tried (%)",
    "left 1, 2, ... tokens (%)",
    "accept length by context",
)


@dataclass
class Acceptance:
    """Counts of verifies, each list as long as it has to be.

    drafted[n]    verifies that drafted n tokens, one behind the other (of a tree: n deep)
    accepted[n]   those that accepted n of them
    exhausted[n]  those that drafted n and accepted them all
    verifies[k]   those behind 2^k to 2^(k+1) - 1 tokens
    emitted[k]    tokens that these left, bonus included
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    exhausted: list[int] = field(default_factory=list)
    verifies: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    def count(self, *, context: int, room: int, kept: int, drafted: int, accepted: int) -> tuple[int, int]:
        """Book a verify behind `context` tokens that might leave `room` tokens and left `kept`. Returns how many of its
        drafts count, and how many of these were right."""
        # Of drafts cut off behind a stop or the limit nobody can say whether they were right.
        known = min(drafted, room if kept > accepted else kept)
        right = min(accepted, known)
        _add(self.drafted, known)
        _add(self.accepted, right)
        if right == known:
            _add(self.exhausted, known)
        bucket = context.bit_length() - 1
        _add(self.verifies, bucket)
        _add(self.emitted, bucket, kept)
        return known, right

    def __iadd__(self, other: Acceptance) -> Acceptance:
        for item in fields(self):
            mine = getattr(self, item.name)
            for place, amount in enumerate(getattr(other, item.name)):
                _add(mine, place, amount)
        return self

    @property
    def first(self) -> tuple[int, int]:
        """Verifies that drafted anything, and those that accepted their first draft."""
        return sum(self.drafted[1:]), sum(self.accepted[1:])

    def as_counters(self) -> dict[str, Any]:
        """What a record holds. Of each draft, the first one at 0: verifies that drafted it; that tried it, which is
        that they also accepted all before it; that accepted it. Of each bucket of contexts that has any: from how many
        tokens on, verifies, tokens emitted."""
        count = max(len(self.drafted) - 1, 0)
        drafted, accepted = _at_least(self.drafted, count + 1), _at_least(self.accepted, count + 1)
        # Whoever accepted n drafts tried another one, if there was one.
        ended = self.exhausted + [0] * count
        buckets = zip(self.verifies, self.emitted, strict=True)
        return {
            "drafted": drafted[1:],
            "tried": [accepted[place] - ended[place] for place in range(count)],
            "accepted": accepted[1:],
            "context": [[1 << k, verifies, emitted] for k, (verifies, emitted) in enumerate(buckets) if verifies],
        }


def _add(counts: list[int], place: int, amount: int = 1) -> None:
    if place >= len(counts):
        counts += [0] * (place + 1 - len(counts))
    counts[place] += amount


def _at_least(counts: list[int], length: int) -> list[int]:
    """How many count 0, 1, 2, ... or more."""
    padded = counts + [0] * (length - len(counts))
    return [sum(padded[place:]) for place in range(length)]


def cells(records: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """A row under `TITLES` from the counters of one or more runs of a configuration; None where none drafted."""
    found = [counters for counters in records if "acceptance" in counters]
    drafted, tried, accepted = (
        summed(counters["acceptance"][name] for counters in found) for name in ("drafted", "tried", "accepted")
    )
    if not any(drafted):
        return None
    left = summed(counters["emitted_histogram"] for counters in found)
    contexts: dict[int, list[int]] = {}
    for start, *amounts in (bucket for counters in found for bucket in counters["acceptance"]["context"]):
        contexts[start] = summed([contexts.get(start, []), amounts])
    return [
        str(sum(left)),
        _percents(accepted, drafted),
        _percents(accepted, tried),
        _percents(left[1:], [sum(left)] * (len(left) - 1)),
        ", ".join(f"{start}+: {emitted / count:.2f}" for start, (count, emitted) in sorted(contexts.items())),
    ]


def table(rows: Mapping[tuple[Any, ...], Iterable[Mapping[str, Any]]], names: tuple[str, ...] = ()) -> str:
    """Markdown: a row of `cells` for each key, whose parts stand under `names`; "" where nothing was drafted."""
    from tabulate import tabulate

    body = [[*key, *shown] for key, counters in rows.items() if (shown := cells(counters))]
    return tabulate(body, headers=[*names, *TITLES], tablefmt="github", disable_numparse=True) if body else ""


def summed(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _percents(counts: list[int], of: list[int]) -> str:
    return " ".join(f"{100 * count / whole:.0f}" if whole else "-" for count, whole in zip(counts, of, strict=True))


class Watch:
    """Says once that the first draft is hardly ever accepted, as soon as that is clear, and behind the run what a
    second look at its requests shows."""

    def __init__(self, causes: str, say: Callable[[str], None], look: Look | None = None) -> None:
        """causes: what it likely comes from, with this way of drafting; look: see `Drafter`."""
        self._causes = causes
        self._say = say
        self._look = look
        self._said = False
        self._drafted = self._accepted = 0

    def see(self, counts: Acceptance) -> None:
        """Take a finished request in."""
        drafted, accepted = counts.first
        self._drafted += drafted
        self._accepted += accepted
        if self._said or self._drafted < ENOUGH or self._accepted >= LOW * self._drafted:
            return
        share = f"{self._accepted / self._drafted:.1%} of {self._drafted}"
        self._say(f"low acceptance: of the first drafts {share} were accepted\n  likely causes: {self._causes}")
        self._said = True

    def end(self, ended: Sequence[Completion]) -> None:
        """Behind a run, with nothing in flight."""
        if self._said and self._look is not None:
            look, self._look = self._look, None
            self._say(f"  {look(ended)}")
