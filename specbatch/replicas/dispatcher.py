"""Decides which replica runs which prompt, and what happens to the prompts of a replica that ends. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from specbatch.engine.submissions import Submission

MOST_DEATHS = 3  # of replicas that ran a prompt, before it is given up


@dataclass
class Item:
    """A submission with its time of arrival. deaths: replicas that ended while they had it."""

    submission: Submission
    arrived: float
    deaths: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.submission.index, self.submission.sample


class Dispatcher:
    """The unfinished prompts of a stream: waiting, or on a replica.

    Each prompt goes to the replica with the fewest, and the samples of a prompt stay together, since they share its
    KV pages. The prompts of a replica that ends run again. If two replicas have ended with a prompt, it runs alone on
    the third one, when a replica is idle, so that a prompt is given up only if it is the cause.
    """

    def __init__(self, room: int) -> None:
        """room: the most prompts that a replica has at a time."""
        self._room = room
        self._waiting: deque[Item] = deque()
        self._suspects: deque[Item] = deque()
        self._running: dict[int, dict[tuple[int, int], Item]] = {}  # by replica
        self._last: tuple[int, int] | None = None  # index of a prompt and its replica

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._suspects) + sum(map(len, self._running.values()))

    def add(self, item: Item) -> None:
        self._waiting.append(item)

    def assign(self, replicas: Collection[int]) -> Iterator[tuple[int, Item]]:
        """Hand waiting prompts to replicas that are ready and have room."""
        while self._suspects and (idle := [place for place in replicas if not self._running.get(place)]):
            yield self._give(idle[0], self._suspects.popleft())
        while self._waiting and (place := self._place_for(self._waiting[0], replicas)) is not None:
            yield self._give(place, self._waiting.popleft())

    def finish(self, replica: int, key: tuple[int, int]) -> Item | None:
        """A prompt has ended; None if the replica does not have it any more."""
        return self._running.get(replica, {}).pop(key, None)

    def lose(self, replica: int) -> list[Item]:
        """A replica has ended. Its prompts wait again, before all others. Returns those that are given up."""
        lost = self._running.pop(replica, {})
        for item in reversed(lost.values()):
            item.deaths += 1
            if item.deaths == MOST_DEATHS - 1:
                self._suspects.appendleft(item)
            elif item.deaths < MOST_DEATHS:
                self._waiting.appendleft(item)
        return [item for item in lost.values() if item.deaths >= MOST_DEATHS]

    def _give(self, place: int, item: Item) -> tuple[int, Item]:
        self._running.setdefault(place, {})[item.key] = item
        self._last = item.submission.index, place
        return place, item

    def _place_for(self, item: Item, replicas: Collection[int]) -> int | None:
        """The replica for a prompt; None if none has room."""
        if self._last is not None and item.submission.sample:
            index, place = self._last
            if index == item.submission.index and place in replicas and not self._runs_suspect(place):
                return place
        free = [place for place in replicas if not self._runs_suspect(place)]
        best = min(free, key=lambda place: len(self._running.get(place, ())), default=None)
        return best if best is not None and len(self._running.get(best, ())) < self._room else None

    def _runs_suspect(self, place: int) -> bool:
        running = self._running.get(place, {})
        return len(running) == 1 and next(iter(running.values())).deaths == MOST_DEATHS - 1
