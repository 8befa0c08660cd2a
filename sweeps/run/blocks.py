"""Runs the points of a sweep or an evaluation on the workers of a Ray cluster, in whole blocks.

A block is all configurations at one concurrency and repeat. It runs on one worker, so that configurations are compared
on one card: two cards of a kind can differ by several percent.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from specbatch.config.engine_config import EngineConfig
from specbatch.errors import FailedError, SpecbatchError
from specbatch.progress.bars import NotedReport, Waves
from specbatch.records.sweep_plan import Point, check_plan, points
from specbatch.replicas.cluster import Cluster
from specbatch.replicas.dispatcher import MOST_DEATHS
from specbatch.replicas.messages import Ended
from specbatch.replicas.pool import MOST_FAILED_STARTS
from specbatch.replicas.ray_actors import actor_class
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
from specbatch.sweeps.run.engine_groups import Failed
from specbatch.sweeps.run.loading import Log
from specbatch.sweeps.run.runner import Measured, PointWorkload, is_measured, measured_points, work_of
from specbatch.sweeps.run.unloaded import check_early

Block = tuple[Point, ...]
Answer = tuple[list[tuple[Point, Measured]], list[str]]  # and the lines of the log


class BlockWorker:
    """Measures blocks in a worker process. The engines of the first block stay loaded for the others."""

    def __init__(self, wanted: Requirements, configs: dict[str, EngineConfig], workload: PointWorkload) -> None:
        self._wanted, self._configs, self._workload = wanted, configs, workload
        self._stack = ExitStack()
        self.engines: Mapping[str, Any] | None = None
        self._failed: Failed = {}

    def where(self) -> str | SpecbatchError:
        """Where the worker runs, or why it cannot work."""
        try:
            meet(self._wanted)
        except SpecbatchError as error:
            return error
        return f"{node()}, process {os.getpid()}"

    def measure(self, block: Block) -> Answer | SpecbatchError:
        lines: list[str] = []
        try:
            if self.engines is None:
                check_early(self._configs, [self._workload], self._failed, log=lines.append)
                opened = self._workload.load(self._configs, lines.append, self._failed)
                self.engines = self._stack.enter_context(opened)
            found = measured_points(
                self._configs, self.engines, self._workload, list(block), lines.append, Waves(None), self._failed
            )
            return list(found), lines
        except SpecbatchError as error:
            return error


def run_blocks(
    cluster: Cluster,
    configs: Mapping[str, EngineConfig],
    workload: PointWorkload,
    folder: Path,
    *,
    log: Log | None = None,
    report: NotedReport | None = None,
) -> None:
    """Run every block with a point that has no record yet, or failed, and save its points when it is done.

    Raises SpecbatchError for what concerns all configurations, and at the end if a block has ended several workers.
    """
    log = log or (lambda line: None)
    plan = workload.plan(configs)
    check_plan(folder, plan, workload.kind)
    left = unfinished_blocks(list(points(configs, workload)), folder)
    if not left:
        log("all points are finished")
        return
    shown_before: set[str] = set()
    some = next(iter(configs.values()))
    with connected(cluster, some):
        needed = cluster.needs_of(some)
        made, arguments = actor_class(BlockWorker, needed), (requirements(*configs.values()), dict(configs), workload)
        workers = _Workers(lambda: made.remote(*arguments), min(cluster.most, len(left)), needed, log)
        works = (work_of(point, workload) for block in left for point in block)
        waves = Waves(report, works, workers=min(cluster.most, len(left)))
        try:
            for found, lines in _measured(left, workers, min(cluster.least, len(left)), log):
                for line in lines:
                    if line not in shown_before:
                        log(line)
                    shown_before.add(line)
                for point, measured in found:
                    workload.save(folder, plan, point, measured)
                    work = work_of(point, workload)
                    waves.add(work.concurrency, work.requests, work.name)
                    waves.finish(*work, measured.record.metrics.get("duration_s"))
        finally:
            workers.close()


def unfinished_blocks(every: list[Point], folder: Path) -> list[Block]:
    """The blocks that have a point without a measurement; all their points run again."""
    blocks = [tuple(block) for _, block in groupby(every, key=lambda point: (point.concurrency, point.repeat))]
    return [block for block in blocks if not all(is_measured(point, folder) for point in block)]


def _measured(blocks: list[Block], workers: _Workers, least: int, log: Log) -> Iterator[Answer]:
    """Give each block to a worker that is free, from when `least` are. That of a worker that is lost runs on another.

    Raises SpecbatchError for what a worker refuses, and at the end if a block has ended several workers.
    """
    waiting, deaths, given_up = deque(blocks), Counter[Block](), list[str]()
    begun = False
    while waiting or workers.busy:
        begun = begun or len(workers.free) >= least
        while begun and waiting and workers.free:
            workers.give(waiting.popleft())
        for block, answer in workers.answers(reports_waiting=not begun):
            if isinstance(answer, Ended):
                if block is not None:
                    deaths[block] += 1
                    if deaths[block] < MOST_DEATHS:
                        waiting.appendleft(block)
                    else:
                        given_up.append(f"{_name(block)} ended {MOST_DEATHS} workers; the last: {answer.reason}")
            elif isinstance(answer, SpecbatchError):
                raise answer
            elif block is not None:
                log(f"{_name(block)}: measured")
                yield answer
    if given_up:
        raise FailedError(f"{'; '.join(given_up)}; the same command runs it again")


class _Workers:
    """Actors that measure a block at a time. One that is lost is replaced.

    free   those that can take a block
    """

    def __init__(self, start: Callable[[], Any], count: int, needed: Mapping[str, int], log: Log) -> None:
        """start: starts an actor."""
        self._start, self._needed, self._log = start, needed, log
        self._calls: dict[Any, tuple[Any, Block | None]] = {}  # by answer: actor and block, None while it starts
        self._failed_starts = 0
        self.free: list[Any] = []
        for _ in range(count):
            self._add()

    @property
    def busy(self) -> bool:
        """Whether one measures a block."""
        return any(block is not None for _, block in self._calls.values())

    def give(self, block: Block) -> None:
        """Let a free worker measure a block."""
        actor = self.free.pop()
        self._calls[actor.measure.remote(block)] = actor, block

    def answers(self, *, reports_waiting: bool) -> Iterator[tuple[Block | None, Any]]:
        """Wait for answers, for at most `PATIENCE_S`: what `BlockWorker` returns, or `Ended`, with the block."""
        import ray

        done, _ = ray.wait(list(self._calls), timeout=PATIENCE_S)
        if not done and reports_waiting:
            self._log(f"a worker {waiting_line(self._needed)}")
        for call in done:
            actor, block = self._calls.pop(call)
            try:
                answer = ray.get(call)
            except Exception as error:  # of Ray, or of the worker
                answer = ending_of(error)
                self._replace(actor, block, answer)
            else:
                self.free.append(actor)
                if block is None and isinstance(answer, str):
                    self._failed_starts = 0
                    self._log(f"a worker runs on {answer}")
            yield block, answer

    def close(self) -> None:
        """End all actors."""
        import ray

        for actor in [*self.free, *(actor for actor, _ in self._calls.values())]:
            ray.kill(actor)

    def _add(self) -> None:
        actor = self._start()
        self._calls[actor.where.remote()] = actor, None

    def _replace(self, actor: Any, block: Block | None, ended: Ended) -> None:
        import ray

        ray.kill(actor)
        self._failed_starts += block is None
        if block is None and not ended.lost:
            raise SpecbatchError(ended.reason)
        if self._failed_starts < MOST_FAILED_STARTS:
            self._log(f"a worker ended ({ended.reason}); starting another")
            self._add()
        elif self.free or self._calls:
            self._log(f"a worker ended ({ended.reason}); going on with the others")
        else:
            raise FailedError(f"no worker is left; the last one ended: {ended.reason}")


def _name(block: Block) -> str:
    return f"concurrency {block[0].concurrency}, repeat {block[0].repeat}"
