"""Settings of a run on a Ray cluster: its address, and how many workers it has. Imports nothing of Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import refuse

PORT = 6379  # of a head node, unless it was started with another
MOST_PORT = 65_535
LOCAL, AUTO = "local", "auto"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster and the number of its workers that hold a replica of the engine.

    address   auto: the cluster that this machine belongs to; local: a new one on this machine alone; or HOST[:PORT] of
              a head node
    least     workers that must be ready before work begins
    most      workers that are started; those above `least` join when the cluster has room for them
    """

    address: str = AUTO
    least: int = 1
    most: int = 1

    def __post_init__(self) -> None:
        found = re.fullmatch(r"auto|local|[\w.-]+(?::([0-9]{1,5}))?", self.address)
        if not found or not 1 <= int(found[1] or PORT) <= MOST_PORT:
            raise refuse("address", self.address, "use auto, local, or HOST[:PORT] of the cluster's head node")
        if not 1 <= self.least <= self.most:
            works = "use a number, or MIN-MAX with MIN at least 1 and at most MAX, such as 2-8"
            raise refuse("workers", self.workers, works)

    @classmethod
    def of(cls, address: str, workers: str) -> Cluster:
        """workers: N or MIN-MAX."""
        if not (found := re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", workers)):
            raise refuse("workers", workers, "use a number, or MIN-MAX such as 2-8")
        return cls(address, int(found[1]), int(found[2] or found[1]))

    @property
    def workers(self) -> str:
        """N or MIN-MAX."""
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"

    def device(self, name: str) -> str:
        """The type of the workers' devices, cpu or cuda, for the setting `device`."""
        if name == "auto":
            if not torch.cuda.is_available() and self.address != LOCAL:
                raise refuse("device", name, "this machine has no GPU, but the workers may; use cuda or cpu")
            return "cuda" if torch.cuda.is_available() else "cpu"
        if ":" in name:
            raise refuse("device", name, "Ray chooses the GPUs of a worker; use cuda")
        return name

    def needs_of(self, config: EngineConfig) -> dict[str, int]:
        """The resources of a worker: a core for each device, and with CUDA as many GPUs, which Ray puts on one node."""
        count = config.tensor_parallel
        return {"CPU": count} if self.device(config.device) == "cpu" else {"CPU": count, "GPU": count}
