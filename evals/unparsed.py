"""Finds the answers in which a task's extraction filter found nothing, whatever later filters make of them.

lm-eval passes the answers of a question through a chain of filters, such as `regex`, `map` and `take_first`. A filter
that extracts has a `fallback`, its value for an answer in which it found nothing. Filters are observed as they run,
because the end of the chain does not show this: the model may have written the same text (`0`), and a later filter may
have changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any


class _Nothing(str):
    """A fallback that can be told from the same text in an answer."""

    def strip(self, chars: str | None = None, /) -> _Nothing:
        """lm-eval's filters strip what they return."""
        return _Nothing(super().strip(chars))


@dataclass
class _Watch:
    """Of one chain of filters: which values that a question still has are of answers without a finding.

    missed    by question; None where a filter that is not lm-eval's own has made it unknown
    extracts  whether a filter of the chain has a fallback
    """

    missed: list[list[bool]] | None = None
    extracts: bool = False

    def start(self, answers: Sequence[Sequence[Any]]) -> None:
        self.missed, self.extracts = [[False] * len(values) for values in answers], False

    def update(self, now: Iterable[list[bool] | None]) -> None:
        found = [values for values in now if values is not None]
        self.missed = found if self.missed is not None and len(found) == len(self.missed) else None


class _Observed:
    """One of lm-eval's filters, built as lm-eval does for each use, that keeps a watch up to date."""

    def __init__(self, build: Callable[[], Any], watch: _Watch, *, is_first: bool) -> None:
        self.filter, self.watch, self.is_first = build(), watch, is_first

    def apply(self, resps: Iterable[Any], docs: Sequence[Any]) -> list[Any]:
        before, watch = list(resps), self.watch
        if self.is_first:
            watch.start(before)
        if hasattr(self.filter, "fallback"):
            watch.extracts = True
            return self._extract(before, docs)
        after = list(self.filter.apply(before, docs))
        if watch.missed is not None:
            watch.update(_kept(self.filter, *of) for of in zip(watch.missed, before, after, strict=True))
        return after

    def _extract(self, before: list[Any], docs: Sequence[Any]) -> list[Any]:
        fallback = self.filter.fallback
        nothing = self.filter.fallback = _Nothing(fallback) if isinstance(fallback, str) else fallback
        after = [list(values) for values in self.filter.apply(before, docs)]
        missed = [[value is nothing or isinstance(value, _Nothing) for value in values] for values in after]
        if self.watch.missed is not None:
            # After an earlier filter has found nothing, a later one can only find something in the fallback.
            self.watch.update(map(_either, self.watch.missed, missed))
        return [
            [fallback if is_missed else value for value, is_missed in zip(*of, strict=True)]
            for of in zip(after, missed, strict=True)
        ]


def _either(one: list[bool], other: list[bool]) -> list[bool] | None:
    return [a or b for a, b in zip(one, other, strict=True)] if len(one) == len(other) else None


def _kept(filter: Any, missed: list[bool], before: Any, after: Any) -> list[bool] | None:
    """Which of a question's values after `filter` are of answers without a finding; None: not known."""
    from lm_eval.filters.selection import MajorityVoteFilter, TakeFirstFilter, TakeKFilter

    if isinstance(filter, TakeFirstFilter):
        return missed[:1]
    if isinstance(filter, TakeKFilter):
        return missed[: filter.k]
    if isinstance(filter, MajorityVoteFilter):
        return [all(is_missed for is_missed, value in zip(missed, before, strict=True) if value == after[0])]
    # All that is made of a single answer is of this answer, such as what `map` makes of each of its characters.
    same = len(missed) == 1 or (isinstance(after, list) and len(after) == len(missed))
    return missed if same else None


def observe_filters(task: Any) -> None:
    """Observe the filters of lm-eval's task from now on."""
    for chain in task._filters:
        chain.watch = _Watch()
        chain.filters = [
            partial(_Observed, build, chain.watch, is_first=place == 0) for place, build in enumerate(chain.filters)
        ]


def unparsed_share(tasks: Iterable[Any], filter: str) -> float | None:
    """After lm-eval has run the filters of its `tasks`: the share of the scored values in which the filter of this name
    found nothing, as a mean over the questions. None if it extracts nothing in one of the tasks, or if it is not known.

    A majority vote is one value. It counts if all answers that voted for it are without a finding.
    """
    watches = [next((chain.watch for chain in task._filters if chain.name == filter), None) for task in tasks]
    shares = []
    for watch in watches:
        if watch is None or not watch.extracts or watch.missed is None:
            return None
        shares += [sum(values) / len(values) for values in watch.missed]
    return sum(shares) / len(shares) if shares else None
