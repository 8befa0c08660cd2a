"""Replicas as actors of a Ray cluster.

cluster = Cluster("auto", least=2, most=8)
config = EngineConfig("Qwen/Qwen3-8B", device="cuda", data_parallel=cluster.most)
with connected_actors(config, cluster) as starter, DataParallelEngine(config, starter=starter) as engine:
    ...
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError
from specbatch.replicas.cluster import Cluster
from specbatch.replicas.messages import Command, Ended, Message, Output
from specbatch.replicas.ray_cluster import (
    PATIENCE_S,
    Requirements,
    connected,
    ending_of,
    meet,
    node,
    requirements,
    waiting_line,
)

if TYPE_CHECKING:
    from specbatch.replicas.replica import Replica

POLL_S = 5.0  # for which a worker without messages keeps a request for them
EXIT_S = 5.0
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # which torch reads when it is imported
THREADS = 4  # of an actor: one waits for messages


class ReplicaActor:
    """Holds a replica in a worker process: commands arrive as calls, and messages leave as answers to a long poll."""

    def __init__(self, wanted: Requirements) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._early: dict[int, bytes] = {}  # commands that arrived before an earlier one, by number
        self._next = 0
        self._receiving = threading.Lock()
        self._replica: Replica | None = None
        try:
            meet(wanted)
        except SpecbatchError as error:
            self._messages.put(Ended(str(error)))
            return
        from specbatch.replicas.replica import Replica

        self._messages.put(Output(f"runs on {node()}, process {os.getpid()}"))
        self._replica = Replica(self._messages.put)
        threading.Thread(target=self._replica.run, daemon=True).start()

    def receive(self, number: int, command: bytes) -> None:
        """Take the command with a number. Ray may run calls in another order than that in which they were made."""
        with self._receiving:
            self._early[number] = command
            while (data := self._early.pop(self._next, None)) is not None:
                self._next += 1
                if self._replica is not None:
                    self._replica.receive(pickle.loads(data))

    def messages(self) -> list[Message]:
        """All messages that have not been fetched. Waits for the first, up to `POLL_S` seconds."""
        found = []
        with suppress(Empty):
            found.append(self._messages.get(timeout=POLL_S))
            while True:
                found.append(self._messages.get_nowait())
        return found


def actor_class(made: type[Any], needed: Mapping[str, int], **options: Any) -> Any:
    """The actors of a class, each with the resources that are needed. Ray does not restart them."""
    import ray

    options |= {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0), "max_restarts": 0}
    if allocator := {name: os.environ[name] for name in ALLOCATOR if name in os.environ}:
        options["runtime_env"] = {"env_vars": allocator}
    return ray.remote(**options)(made)


class RayActors:
    """Starts the replicas of an engine as actors. A pending actor is a request that makes an autoscaler add nodes.

    The GPUs of an actor are on one node, so those of a tensor-parallel replica need no placement group.
    """

    def __init__(self, config: EngineConfig, cluster: Cluster) -> None:
        self.least, self.most = cluster.least, cluster.most
        self._needs = cluster.needs_of(config)
        self._class = actor_class(ReplicaActor, self._needs, max_concurrency=THREADS)
        self._wanted = requirements(config)

    def start(self, place: int, deliver: Callable[[Message], None]) -> ActorLink:
        """Start an actor. The place is of no importance: Ray chooses its node."""
        return ActorLink(self._class.remote(self._wanted), self._needs, deliver)


@contextmanager
def connected_actors(config: EngineConfig, cluster: Cluster) -> Iterator[RayActors]:
    """`RayActors` on a cluster that this process is connected to meanwhile."""
    with connected(cluster, config):
        yield RayActors(config, cluster)


class ActorLink:
    """The connection to a replica in an actor."""

    def __init__(self, actor: Any, needed: dict[str, int], deliver: Callable[[Message], None]) -> None:
        """needed: the resources of the actor."""
        self._actor, self._needed = actor, needed
        self._numbers = count()
        self._thread = threading.Thread(target=self._read, args=(deliver,), daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Pass on a command. A replica that has ended ignores it: its last message says so."""
        self._actor.receive.remote(next(self._numbers), pickle.dumps(command))

    def close(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._actor)
        self._thread.join(EXIT_S)

    def _read(self, deliver: Callable[[Message], None]) -> None:
        import ray

        try:
            first = self._actor.messages.remote()
            if not ray.wait([first], timeout=PATIENCE_S)[0]:
                deliver(Output(waiting_line(self._needed)))
            messages = ray.get(first)
            while True:
                for message in messages:
                    deliver(message)
                    if isinstance(message, Ended):
                        return
                messages = ray.get(self._actor.messages.remote())
        except Exception as error:  # of Ray: the actor or its node has died
            deliver(ending_of(error))
