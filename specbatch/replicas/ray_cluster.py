"""Connects to a Ray cluster, and checks that a worker fits this process: versions and paths."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import SpecbatchError, counted, refuse
from specbatch.extras import needs
from specbatch.replicas.cluster import AUTO, LOCAL, PORT, Cluster
from specbatch.replicas.messages import Ended
from specbatch.version import __version__

PATIENCE_S = 30.0  # before a worker that waits for resources is reported
ANSWER_S = 5.0  # for a head node to accept a connection; `ray.init` itself tries for minutes
RETRIES = "RAY_NUM_REDIS_GET_RETRIES"  # of 40 seconds each, where something else than a head node answers
OBJECT_STORE_BYTES = 100 * 2**20  # of a local cluster: messages between replicas are small
LAST_STARTED = Path("/tmp/ray/ray_current_cluster")  # where `ray start` leaves the address for "auto"


@contextmanager
def connected(cluster: Cluster, config: EngineConfig) -> Iterator[None]:
    """Connect this process to the cluster, or start a local one, and leave it at the end. A connection that exists
    already, made with `ray.init`, is used and kept.

    Raises SpecbatchError if the cluster does not answer or has other versions, or if a local one is too small.
    """
    needs("ray")
    if cluster.address != LOCAL:
        os.environ.setdefault(RETRIES, "1")  # read when Ray is imported
    import ray

    if ray.is_initialized():
        yield
        return
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = cluster.address
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        how |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        address = _answering(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, **how)
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        raise refuse("address", cluster.address, why_not(str(error))) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set its own
    try:
        if address == LOCAL:
            check_size(cluster, cluster.needs_of(config), ray.cluster_resources())
        yield
    finally:
        ray.shutdown()


def _answering(address: str) -> str:
    """The address; that of a server in full. Refused: one where nothing accepts connections."""
    known = address
    if address == AUTO:
        known = os.environ.get("RAY_ADDRESS", "")
        with suppress(OSError):
            known = known or LAST_STARTED.read_text()
        if not known:
            return AUTO
    host, _, port = known.strip().partition(":")
    try:
        socket.create_connection((host, int(port or PORT)), ANSWER_S).close()
    except (OSError, ValueError) as error:
        works = f"nothing answers at {host}:{port or PORT} ({error}); start a head node there with `ray start --head`"
        raise refuse("address", address, works) from None
    # Ray finds its own address of "auto" with the token of this machine.
    return address if address == AUTO else f"{host}:{port or PORT}"


def why_not(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if "Version mismatch" in error:
        theirs, own = (
            " and ".join(" ".join(item) for item in re.findall(r"(Ray|Python): ([\w.]+)", part))
            for part in error.split("This process", 1)
        )
        return f"the cluster has {theirs}, and this process {own}; install the same versions on all machines"
    if "Could not find any running Ray instance" in error:
        return "no Ray cluster runs on this machine; use local, or HOST:PORT of a head node"
    if "Failed to connect" in error:
        port = f"its port is {PORT}, or that of `ray start --port`"
        return f"what answers there is no head node of Ray ({port}), or wants a token (set RAY_AUTH_MODE=token)"
    return f"Ray cannot connect: {' '.join(lines[:2])}"


def check_size(cluster: Cluster, each: Mapping[str, int], present: Mapping[str, float]) -> None:
    for name, count in each.items():
        if cluster.least * count > (there := int(present.get(name, 0))):
            needed = f"{counted(cluster.least, 'worker')} would need {counted(cluster.least * count, name)}"
            works = f"use at most {there // count}" if there >= count else "use the address of a cluster"
            raise refuse("workers", cluster.workers, f"{needed}, and this machine has {there}; {works}")


@dataclass(frozen=True)
class Requirements:
    """What a worker must have in common with the process that leads it. Plain values, for any version to read.

    folder   where the process runs; a worker goes there if it can, so that relative paths mean the same
    paths    of models and drafts that are folders or files, absolute
    """

    versions: dict[str, str]
    folder: str
    paths: list[str]


def requirements(*configs: EngineConfig) -> Requirements:
    names = {name for item in configs for name in (item.model, item.tokenizer, item.speculation.draft) if name}
    paths = sorted(str(Path(name).absolute()) for name in names if Path(name).exists())
    return Requirements(versions(), os.getcwd(), paths)


def versions() -> dict[str, str]:
    import ray

    return {"Python": platform.python_version(), "Ray": ray.__version__, "specbatch": __version__}


def meet(wanted: Requirements) -> None:
    """On a worker: go to the folder, and raise SpecbatchError if versions differ or a path is missing."""
    with suppress(OSError):
        os.chdir(wanted.folder)
    for name, version in versions().items():
        if version != wanted.versions[name]:
            there = f"{name} {version} and the process that leads it {wanted.versions[name]}"
            raise SpecbatchError(f"worker on {node()} has {there}; install the same version on all machines")
    for path in wanted.paths:
        if not Path(path).exists():
            works = "put it in a folder that all machines share, or use a hub id"
            raise SpecbatchError(f"worker on {node()} cannot find {path}; {works}")


def waiting_line(needed: Mapping[str, int]) -> str:
    """What a worker that has not started waits for."""
    import ray

    free = ray.available_resources()
    wanted = " and ".join(f"{count} {name}" for name, count in needed.items())
    there = " and ".join(f"{free.get(name, 0):g} {name}" for name in needed)
    return f"waits for a node with {wanted}; the whole cluster has {there} free"


def node() -> str:
    """The address of the node that this worker runs on."""
    import ray

    return str(ray.util.get_node_ip_address())


def ending_of(error: Exception) -> Ended:
    """Why an actor ended, from Ray's exception."""
    text = str(error)
    where = next((f" on {line.split()[1]}" for line in text.splitlines() if line.strip().startswith("ip:")), "")
    if "No module named 'specbatch" in text:
        return Ended("a worker lacks specbatch or has an older one; install the same version on all machines")
    for what in ("node", "process"):
        if f"{what} has died" in text:
            return Ended(f"its {what}{where} was lost", lost=True)
    if "temporarily unavailable" in text:
        return Ended(f"its process{where} cannot be reached", lost=True)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
    return Ended(last, lost=True)
