"""Places for the tables of grammars in one array on the device. Host only.

A table stays where it is while a request uses it, and after that until its place is needed, the longest unused first.
"""

from __future__ import annotations

from collections.abc import Iterator

from specbatch.grammar.token_automaton import TokenAutomaton

CELLS = 32 << 20  # int16: 64 MiB, which every engine has, so that the first grammar of a job cannot run out of memory


class GrammarPool:
    """Each table that is placed, with its start and a reference of each request that uses it."""

    def __init__(self, cells: int = CELLS) -> None:
        self.cells = cells
        self._placed: dict[TokenAutomaton, list[int]] = {}  # start and reference count; the last used come last
        self._new: list[tuple[int, TokenAutomaton]] = []

    def allocate(self, automaton: TokenAutomaton) -> int | None:
        """Place a table, unless it is there, and add a reference for a request. Returns its start, None if there is no
        room before another request ends."""
        if automaton in self._placed:
            start, count = self._placed.pop(automaton)
            self._placed[automaton] = [start, count + 1]
            return start
        while (room := self._room(automaton.size)) is None:
            unused = next((item for item, (_, count) in self._placed.items() if not count), None)
            if unused is None:
                return None
            del self._placed[unused]
            self._new = [item for item in self._new if item[1] is not unused]
        self._placed[automaton] = [room, 1]
        self._new.append((room, automaton))
        return room

    def decref(self, automaton: TokenAutomaton) -> None:
        """Remove the reference of a request; the table stays until its place is needed."""
        self._placed[automaton][1] -= 1

    def take_new(self) -> Iterator[tuple[int, TokenAutomaton]]:
        """Tables that were placed since the last call, and where. One counts as taken when the next is asked for: the
        caller may fail to write it."""
        while self._new:
            yield self._new[0]
            del self._new[0]

    def _room(self, size: int) -> int | None:
        """The first place with so many free cells."""
        start = 0
        for item, (taken, _) in sorted(self._placed.items(), key=lambda pair: pair[1][0]):
            if taken - start >= size:
                return start
            start = taken + item.size
        return start if self.cells - start >= size else None
