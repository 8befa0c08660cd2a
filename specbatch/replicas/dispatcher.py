"""Decides which replica runs which prompt, and what happens to the prompts of a replica that ends. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from specbatch.engine.requests.submissions import Submission

MOST_DEATHS = 3  # of replicas that ran a prompt, before it is given up


@dataclass
class Item:
    """A submission with its time of arrival. deaths: the places of replicas that ended while they had it."""

    submission: Submission
    arrived: float
    deaths: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.submission.index, self.submission.sample


class Dispatcher:
    """The unfinished prompts of a stream: waiting, or on a replica.

    Each prompt goes to the replica with the fewest, and the samples of a prompt stay together, since they share its
    KV pages. The prompts of a replica that ends run again. If two replicas have ended with a prompt, it runs alone on
    the third one, when a replica is idle, so that a prompt is given up only if it is the cause. Unless there is only
    one place for replicas, the third one has another place: it may be the GPU that is the cause.
    """

    def __init__(self, room: int) -> None:
        """room: the most prompts that a replica has at a time."""
        self._room = room
        self._waiting: deque[Item] = deque()
        self._suspects: deque[Item] = deque()
        self._running: dict[int, dict[tuple[int, int], Item]] = {}  # by replica
        self._places: dict[int, int] = {}  # of the replicas
        self._last: tuple[int, int] | None = None  # index of a prompt and its replica

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._suspects) + sum(map(len, self._running.values()))

    def add(self, item: Item) -> None:
        self._waiting.append(item)

    @property
    def busy(self) -> list[int]:
        """The replicas that have prompts."""
        return [replica for replica, items in self._running.items() if items]

    def assign(self, places: Mapping[int, int]) -> Iterator[tuple[int, Item]]:
        """Hand waiting prompts to replicas that are ready and have room. places: of these replicas."""
        self._places |= places
        for _ in range(len(self._suspects)):
            item = self._suspects.popleft()
            replica = self._idle_for(item, places)
            if replica is None:
                self._suspects.append(item)
            else:
                yield self._give(replica, item)
        while self._waiting and (chosen := self._replica_for(self._waiting[0], places)) is not None:
            yield self._give(chosen, self._waiting.popleft())

    def finish(self, replica: int, key: tuple[int, int]) -> Item | None:
        """A prompt has ended; None if the replica does not have it any more."""
        return self._running.get(replica, {}).pop(key, None)

    def lose(self, replica: int, *, blames: bool = True) -> list[Item]:
        """A replica has ended. Its prompts wait again, before all others. Returns those that are given up. blames:
        whether one of them may be the cause."""
        lost, place = self._running.pop(replica, {}), self._places.pop(replica, None)
        for item in reversed(lost.values()):
            assert place is not None
            item.deaths += [place] * blames
            if len(item.deaths) == MOST_DEATHS - 1:
                self._suspects.appendleft(item)
            elif len(item.deaths) < MOST_DEATHS:
                self._waiting.appendleft(item)
        return [item for item in lost.values() if len(item.deaths) >= MOST_DEATHS]

    def _give(self, replica: int, item: Item) -> tuple[int, Item]:
        self._running.setdefault(replica, {})[item.key] = item
        self._last = item.submission.index, replica
        return replica, item

    def _idle_for(self, suspect: Item, places: Mapping[int, int]) -> int | None:
        """A replica without prompts, at a place where the suspect has ended none; None if it has to wait for one."""
        untried = [replica for replica, place in places.items() if place not in suspect.deaths]
        return next((replica for replica in untried or places if not self._running.get(replica)), None)

    def _replica_for(self, item: Item, replicas: Collection[int]) -> int | None:
        """The replica for a prompt; None if none has room."""
        if self._last is not None and item.submission.sample:
            index, last = self._last
            if index == item.submission.index and last in replicas and not self._runs_suspect(last):
                return last
        free = [replica for replica in replicas if not self._runs_suspect(replica)]
        best = min(free, key=lambda replica: len(self._running.get(replica, ())), default=None)
        return best if best is not None and len(self._running.get(best, ())) < self._room else None

    def _runs_suspect(self, replica: int) -> bool:
        running = self._running.get(replica, {})
        return len(running) == 1 and len(next(iter(running.values())).deaths) == MOST_DEATHS - 1
