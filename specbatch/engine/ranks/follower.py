"""Worker process of a tensor-parallel engine, for ranks other than 0 (see `specbatch.engine.ranks.ranks`).

python -m specbatch.engine.ranks.follower FD RANK SIZE PORT DEVICE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from specbatch.config.engine_config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.engine.ranks.rank_link import (
    BUILD,
    CLOSE,
    Built,
    Call,
    Digests,
    Failed,
    Link,
    Message,
    Progress,
    connect,
    join_group,
)
from specbatch.engine.schedule.smaller_batch import launch_of
from specbatch.engine.setup.builder import EngineParts, build
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.memory.planner import MemoryShare
from specbatch.progress.bars import Report
from specbatch.runtime.device import is_out_of_memory


def main() -> None:
    """Join the group and make the calls of rank 0, which reports an exception. The end of the connection ends this
    process, wherever it is."""
    rank, size, port, device = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    link = Link(Connection(int(sys.argv[1])), lambda: os._exit(0))
    try:
        communicator = join_group(connect(port, size), rank, size, device)
        follow(link.calls(), link.send, communicator, f"cuda:{rank}" if device == "cuda" else device)
    except Exception as error:
        link.send(Failed.of(error))
    os._exit(1)  # at once: a collective of this rank may be under way


def follow(calls: Iterator[Call], send: Callable[[Message], None], ranks: Communicator, device: str) -> None:
    """Build this rank's parts of engines and make the calls of rank 0, in their order. Report which parts are built."""
    engines: dict[int, EngineParts] = {}
    for engine, name, arguments in calls:
        if name == BUILD:
            engines[engine] = parts = _build(engines, partial(_send_progress, send, engine), ranks, device, *arguments)
            if parts.worker.token_check is not None:
                parts.worker.token_check.report = lambda *copied, engine=engine: send(Digests(engine, *copied))
            parts.worker.host.receive = lambda: next(calls)[2][0]
            send(Built(engine))
        elif name == CLOSE:
            engines.pop(engine).worker.close()
        else:
            parts = engines[engine]
            with torch.inference_mode(), on_device(parts.device):
                try:
                    getattr(parts.worker, name)(*arguments)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    raise launch_of(name, arguments, ranks.rank).error(parts.plan) from error


def _build(
    engines: dict[int, EngineParts],
    report: Report,
    ranks: Communicator,
    device: str,
    config: EngineConfig,
    share: MemoryShare,
    shared: int | None,
) -> EngineParts:
    """shared: the engine whose weights are used."""
    step = None if shared is None else engines[shared].worker.decode_step
    with on_device(torch.device(device)):
        return build(replace(config, device=device), _silent, report, shared=step, share=share, ranks=ranks)


def _send_progress(send: Callable[[Message], None], engine: int, done: int, total: int) -> None:
    send(Progress(engine, done, total))


def _silent(line: str) -> None:
    """In place of a log: that of rank 0 says the same."""


if __name__ == "__main__":
    main()
