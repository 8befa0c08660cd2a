"""Data-parallel engine: replicas of an engine on one queue of prompts, with the interface of one engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from specbatch import weights
from specbatch.config.engine_config import EngineConfig
from specbatch.engine.interface import Events, InferenceEngine
from specbatch.engine.requests.open_requests import Detail, StreamEvent
from specbatch.engine.requests.prompt_reader import PromptReader
from specbatch.engine.requests.submissions import Source
from specbatch.engine.scoring import Likelihood, OnScore, Pair, checked_pairs
from specbatch.errors import refuse
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.progress.bars import Report
from specbatch.records.run_record import RunRecord
from specbatch.replicas.merged_record import MergedWindow
from specbatch.replicas.messages import Build
from specbatch.replicas.pool import ReplicaPool, Starter
from specbatch.replicas.process import LocalProcesses
from specbatch.replicas.scoring import score_on
from specbatch.replicas.stream import ReplicaStream
from specbatch.runtime.device import device_type
from specbatch.weights import Log

if TYPE_CHECKING:
    import torch

ARRIVAL_S = 0.001  # between looks for prompts that arrive by a clock
ABORT_S = 0.05  # between looks for aborts
_numbers = count()


class DataParallelEngine(InferenceEngine):
    """`EngineConfig.data_parallel` replicas of an engine, each with devices of its own, with one queue of prompts.

    Its methods are those of `Engine`, and for a seed so are the tokens. An event of a stream is a whole completion. If
    a replica ends, for example because its process is killed, another one is started and runs the prompts that it had
    not finished; a prompt that ends three replicas has a completion with an error. `concurrency` counts the requests on
    all replicas.

    log, report, weights_of, share: as for `Engine`; starter: of the replicas, by default as processes of this machine
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log: Log | None = None,
        report: Report | None = None,
        weights_of: DataParallelEngine | None = None,
        share: MemoryShare = EXCLUSIVE,
        starter: Starter | None = None,
    ) -> None:
        super().__init__()
        log = log or (lambda line: None)
        checkpoint = weights.open_checkpoint(
            config.model,
            config.load_format,
            seed=config.seed,
            tokenizer=config.tokenizer,
            log=lambda line: None,
            device="cpu",
        )
        self.tokenizer = checkpoint.tokenizer()
        self._vocabulary = checkpoint.config.vocab_size
        self._number = next(_numbers)
        self._owns_pool = weights_of is None
        self._pool: ReplicaPool
        self._pool = ReplicaPool(starter or LocalProcesses(config), log) if weights_of is None else weights_of._pool
        shared = None if weights_of is None else weights_of._number
        try:
            own, share = of_one(config, share)
            log(f"replicas: {config.data_parallel}, each as follows")
            built = self._pool.build(Build(self._number, own, share, shared), log, report or (lambda done, total: None))
        except BaseException:
            if self._owns_pool:
                self._pool.close()
            raise
        self.config = replace(built.config, data_parallel=config.data_parallel, job=config.job)
        self.caps = built.caps
        self._prompts = PromptReader(self.tokenizer, checkpoint.config, self.caps, log)
        self._streams = count()
        self._aborts: list[int | str] = []  # in the open stream
        self.reset_record()

    def score(self, pairs: Sequence[Pair], *, on_score: OnScore | None = None) -> list[Likelihood]:
        checked = checked_pairs(pairs, self._vocabulary, self.caps["max_model_len"])
        self._require("ready")
        self._state = "busy"
        start = time.perf_counter()
        try:
            found = score_on(self._pool, self._number, checked, on_score or (lambda index, likelihood: None))
        finally:
            self._state = "ready"
        self._window.tally.add(checked, found, time.perf_counter() - start)
        return found

    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        self._require("ready")
        logits: torch.Tensor = self._pool.call_one(self._number, "next_logits", tokens=tokens)
        return logits

    def forget_prefixes(self) -> None:
        self._require("ready")
        self._pool.call_all(self._number, "forget_prefixes")

    def abort(self, request: int | str) -> None:
        self._aborts.append(request)

    def reset_record(self, *, rows: bool = True) -> None:
        self._require("ready")
        self._pool.call_all(self._number, "reset_record", rows=False)
        self._window = MergedWindow(rows=rows, replaced=self._pool.replaced)

    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        self._require("ready")
        parts = self._pool.call_all(self._number, "record")
        record = self._window.record(self.config.as_dict(), dict(self.caps), concurrency, workload or {}, parts)
        if replaced := self._pool.replaced - self._window.replaced:
            record.counters["replaced_replicas"] = replaced
        return record

    def close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        if self._owns_pool:
            self._pool.close()
        else:
            self._pool.close_engine(self._number)

    # -- inside -----------------------------------------------------------------------------------------------

    def _work(self, source: Source, concurrency: int, detail: Detail) -> Events:
        with self._state_lock:
            self._require("ready")
            self._state = "busy"
        self._aborts.clear()
        stream = ReplicaStream(next(self._streams), self._pool, self._number, 2 * self.caps["max_running"])
        completed = False
        try:
            while source.is_open or stream.unfinished:
                while stream.unfinished < concurrency and (taken := source.take()) is not None:
                    self._window.open(taken[1])
                    stream.add(*taken)
                if not stream.unfinished:
                    source.wait()
                    continue
                stream.dispatch(self._aborts)
                by_clock = source.is_open and stream.unfinished < concurrency
                for done, arrived in stream.receive(ARRIVAL_S if by_clock else ABORT_S):
                    self._window.complete_request(done, arrived)
                    shown = done.text if detail == "text" else ""
                    yield StreamEvent(done.index, done.token_ids, done, shown, done.sample, done.request_id)
                self._require("busy")
            completed = True
        except KeyboardInterrupt:
            for done, arrived in stream.receive(0.0):  # keep what has ended by then
                self._window.complete_request(done, arrived)
                yield StreamEvent(done.index, done.token_ids, done, "", done.sample, done.request_id)
            raise
        finally:
            stream.end(drop=not completed)
            if self._state == "busy":
                self._state = "ready"


def of_one(config: EngineConfig, share: MemoryShare) -> tuple[EngineConfig, MemoryShare]:
    """The configuration of one replica and its share of the memory, which on a CPU the replicas divide."""
    divided = config.data_parallel if device_type(config.device) == "cpu" else 1
    job = config.job.of_one(config.data_parallel)
    return replace(config, data_parallel=1, job=job), replace(share, replicas=divided)


def engine_of(
    config: EngineConfig,
    *,
    log: Log | None = None,
    report: Report | None = None,
    weights_of: InferenceEngine | None = None,
    share: MemoryShare = EXCLUSIVE,
    starter: Starter | None = None,
) -> InferenceEngine:
    """The engine of a configuration: a `DataParallelEngine` for several replicas or a starter, else an `Engine`."""
    from specbatch.engine.engine import Engine

    count = config.data_parallel
    if weights_of is not None and (held := weights_of.config.data_parallel) != count:
        raise refuse("weights_of", f"data_parallel={count}", f"the weights are those of data_parallel={held}; use it")
    how: dict[str, Any] = {"log": log, "report": report, "weights_of": weights_of, "share": share}
    if count == 1 and starter is None:
        return Engine(config, **how)
    return DataParallelEngine(config, starter=starter, **how)
