"""A stand-in for the module `ray`: actors are objects of this process whose calls run in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

LOST = "The actor died unexpectedly.\n\tip: 10.0.0.7\nThe actor is dead because its {what} has died."


class FakeRay:
    """options: of the last class of actors. actors: all that were started. room: how many have resources. connected:
    whether this process is in a cluster already."""

    __version__ = "2.60.0"
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")

    def __init__(self, room: int = 100) -> None:
        self.options: dict[str, Any] = {}
        self.actors: list[FakeActor] = []
        self.room = room
        self.connected = True

    def remote(self, **options: Any) -> Callable[[type[Any]], Any]:
        self.options = options
        return lambda made: _Class(self, made)

    def get(self, found: Future[Any]) -> Any:
        return found.result()

    def wait(self, found: list[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        done, others = wait(found, timeout, FIRST_COMPLETED)
        return list(done), list(others)

    def kill(self, actor: FakeActor) -> None:
        actor.lose("worker process")

    def available_resources(self) -> dict[str, float]:
        return {"CPU": float(self.room - len(self.actors))}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.room)}

    def is_initialized(self) -> bool:
        return self.connected


class _Class:
    def __init__(self, ray: FakeRay, made: type[Any]) -> None:
        self._ray, self._made = ray, made

    def remote(self, *arguments: Any) -> FakeActor:
        waits = len([actor for actor in self._ray.actors if not actor.is_lost]) >= self._ray.room
        self._ray.actors.append(FakeActor(None if waits else lambda: self._made(*arguments)))
        return self._ray.actors[-1]


class FakeActor:
    """made: the actor itself; None if no node has room for it."""

    def __init__(self, made: Callable[[], Any] | None) -> None:
        self._threads = ThreadPoolExecutor(4)
        self._calls: list[Future[Any]] = []
        self.is_lost = False
        self.begin()
        self.made = None if made is None else made()

    def begin(self) -> None:
        """Before it is made; for tests to replace."""

    def lose(self, what: str) -> None:
        """Lose its "worker process" or its "node"."""
        self.is_lost = True
        for call in self._calls:
            if not call.done():
                call.set_exception(RuntimeError(LOST.format(what=what)))

    def __getattr__(self, name: str) -> Any:
        return _Method(lambda *arguments: self._call(name, *arguments))

    def _call(self, name: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.is_lost:
            answer.set_exception(RuntimeError(LOST.format(what="worker process")))
            return answer
        self._calls.append(answer)

        def run() -> None:
            value = getattr(self.made, name)(*arguments)
            if not answer.done():
                answer.set_result(value)

        if self.made is not None:
            self._threads.submit(run)
        return answer


class _Method:
    def __init__(self, remote: Callable[..., Future[Any]]) -> None:
        self.remote = remote
