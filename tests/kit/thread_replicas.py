"""Replicas in threads of this process, which tests can end at any time."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

from specbatch.replicas.messages import Command, Ended, Message
from specbatch.replicas.replica import Replica


class ThreadReplicas:
    """Starts replicas in threads.

    links, places   of all that were started
    spoil           called with each message that a replica sends, and ends the replica by raising an exception
    """

    def __init__(self, most: int, *, least: int | None = None, spoil: Callable[[int, Message], None] | None = None):
        self.least, self.most = least or most, most
        self.links: list[ThreadLink] = []
        self.places: list[int] = []
        self._spoil = spoil or (lambda number, message: None)

    def start(self, place: int, deliver: Callable[[Message], None]) -> ThreadLink:
        number = len(self.links)
        self.places.append(place)
        self.links.append(ThreadLink(deliver, lambda message: self._spoil(number, message)))
        return self.links[-1]


class ThreadLink:
    def __init__(self, deliver: Callable[[Message], None], spoil: Callable[[Message], None]) -> None:
        self._deliver, self._spoil = deliver, spoil
        self._ended = threading.Event()
        self._replica = Replica(self._receive)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def send(self, command: Command) -> None:
        if not self._ended.is_set():
            self._replica.receive(pickle.loads(pickle.dumps(command)))

    def close(self) -> None:
        self._ended.set()

    def kill(self) -> None:
        """End as a process that is killed."""
        if not self._ended.is_set():
            self._ended.set()
            self._deliver(Ended("killed"))

    def _receive(self, message: Message) -> None:
        self._spoil(message)
        if self._ended.is_set():
            raise RuntimeError("the thread of a replica that has ended")
        self._deliver(pickle.loads(pickle.dumps(message)))

    def _run(self) -> None:
        try:
            self._replica.run()
        except Exception:
            self._ended.set()
