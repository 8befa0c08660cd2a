"""The engine: prompts in, completions out. Owns the models, caches, scheduler and schedule."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from specbatch.algorithms import causes_of_low_acceptance
from specbatch.config.engine_config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.device.deferred_interrupts import DeferredInterrupts
from specbatch.engine.interface import Events, InferenceEngine
from specbatch.engine.ranks.ranks import EngineRanks
from specbatch.engine.record_window import RecordWindow
from specbatch.engine.requests.open_requests import Detail, OpenRequests
from specbatch.engine.requests.prompt_reader import PromptReader
from specbatch.engine.requests.submissions import Source, SubmissionQueue
from specbatch.engine.schedule.runner import Runner
from specbatch.engine.schedule.schedules import SCHEDULES
from specbatch.engine.schedule.smaller_batch import Launch
from specbatch.engine.scoring import Likelihood, OnScore, Pair, Scorer, checked_pairs
from specbatch.engine.setup.builder import EngineParts, build
from specbatch.errors import refuse
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.models.config import ModelConfig
from specbatch.progress.bars import Report
from specbatch.records.low_acceptance import LowAcceptanceWarning
from specbatch.records.run_record import RunRecord
from specbatch.runtime.device import is_out_of_memory
from specbatch.runtime.garbage import rare_collections
from specbatch.weights import Log


class Engine(InferenceEngine):
    """Runs prompts on one model in this process. `log` is called with lines such as the memory plan, before the weights
    are loaded.

    `report` is called with the progress of loading layers and recording graphs, on all ranks. `weights_of`: an open
    engine whose target weights are used in place of a copy of one's own. `share`: this engine's part of the memory, if
    several are built one after the other. `parts`: model, scheduler and worker until `close`, for benchmarks and tests.
    `on_shrink`: called with a line when the batch becomes smaller after a lack of memory; by default this is `log`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log: Log | None = None,
        report: Report | None = None,
        weights_of: Engine | None = None,
        share: MemoryShare = EXCLUSIVE,
    ) -> None:
        super().__init__()
        log = log or (lambda line: None)
        if config.data_parallel > 1:
            raise refuse("data_parallel", config.data_parallel, "an Engine is one replica; use DataParallelEngine")
        if weights_of is not None:
            weights_of._check_sharing(config)
        self._ranks: EngineRanks | None = None
        if config.tensor_parallel > 1:
            self._ranks = EngineRanks(config, share, None if weights_of is None else weights_of._ranks)
        self.parts: EngineParts = build(
            config,
            log,
            report or (lambda done, total: None),
            shared=None if weights_of is None else weights_of.parts.worker.decode_step,
            share=share,
            others=self._ranks,
        )
        parts = self.parts
        self.config = parts.config
        self.device = parts.device
        self.tokenizer = parts.tokenizer
        self.plan = parts.plan
        self.caps = parts.caps
        self.model_config: ModelConfig = parts.model.config
        speculation = parts.config.speculation
        self._prompts = PromptReader(self.tokenizer, self.model_config, parts.caps, log)
        self._requests = OpenRequests(parts.scheduler, self.tokenizer, self._prompts, self._on_finish)
        self._runner = Runner(
            parts.scheduler,
            parts.worker,
            parts.draft_length,
            catch_up=parts.draft.catch_up,
            skips_prompts=parts.scheduler.keeps_pages,
            depth=speculation.depth,
            has_budget=speculation.verify_budget is not None,
            seed=config.seed,
            on_tokens=self._requests.add_tokens,
            meanwhile=self._requests.build_one,
            on_result=lambda now, tokens: self._window.add_tokens(now, tokens),
            on_prefill=lambda tokens: self.on_prefill(tokens),
        )
        self._schedule = SCHEDULES[speculation.schedule](self._runner)
        self._scorer = Scorer(
            parts.worker,
            parts.plan,
            shares=parts.config.prefix_cache and not parts.model.recurrent_layers,
            most=lambda: parts.scheduler.prefill_chunk,
            shrink=self._shrink,
        )
        self._trusted = True
        self.on_shrink = log
        can_be_low = speculation.num_drafts and speculation.simulated is None
        causes = causes_of_low_acceptance(speculation.algorithm, config.load_format)
        # A diagnosis runs the model on this rank alone.
        diagnose = parts.diagnose if self._ranks is None else lambda completions: None
        self._watch = LowAcceptanceWarning(causes, log, diagnose) if can_be_low else None
        self.reset_record()

    # -- work -------------------------------------------------------------------------------------------------

    def serve(self, queue: SubmissionQueue) -> Events:
        """As `stream`, of submissions that another thread adds to `queue`, until it is closed and empty. They are not
        checked. Events have no text."""
        return self._work(queue, sys.maxsize, "tokens")

    def _work(self, source: Source, concurrency: int, detail: Detail) -> Events:
        with self._state_lock:
            self._require("ready")
            self._state = "busy"
        self._requests.begin(detail)
        try:
            with rare_collections:
                yield from self._run(source, concurrency)
            with on_device(self.device):
                self.parts.worker.confirm()
            if self._watch is not None:
                with on_device(self.device):
                    self._watch.finish(self._window.examples)
        except (Exception, KeyboardInterrupt) as error:
            self._trusted = False
            yield from self._requests.take_events(is_last=True)  # keep what has ended by then
            self._explain(error, "running prompts")
            raise
        finally:
            self._drop_work()
            if self._state == "busy":
                self._state = "ready"

    def _run(self, source: Source, concurrency: int) -> Events:
        self._runner.rest()
        while source.is_open or self._requests.pending:
            while len(self._requests) < concurrency and (taken := source.take()) is not None:
                item, arrived = taken
                self._window.open(arrived)
                self._requests.submit(item, arrived)
            if not self._requests.pending:
                self._runner.rest()
                source.wait()
                continue
            self._requests.handle_aborts()
            if len(self._requests) and not self._step() and not self._requests.has_events:
                raise RuntimeError(f"{self.parts.scheduler.unfinished} requests are unfinished and nothing can run")
            yield from self._requests.take_events()
            self._require("busy")
        while self._step():  # v2 may have a step in flight, for requests that have ended
            pass

    def score(self, pairs: Sequence[Pair], *, on_score: OnScore | None = None) -> list[Likelihood]:
        self._require("ready")
        self.parts.scheduler.forget_prefixes()
        vocabulary, longest = self.model_config.vocab_size, self.plan.max_model_len
        self._state = "busy"
        try:
            with on_device(self.device), rare_collections:
                return self._scorer.score(checked_pairs(pairs, vocabulary, longest), on_score)
        except Exception as error:
            self._explain(error, "scoring")
            raise
        finally:
            self._state = "ready"

    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        self.parts.worker.prefill_step.on_logits = lambda logits: seen.append(logits[0].float().cpu())
        try:
            self.generate([tokens], SamplingParams(max_new_tokens=1))
        finally:
            self.parts.worker.prefill_step.on_logits = None
        return seen[0]

    def forget_prefixes(self) -> None:
        self._require("ready")
        self.parts.scheduler.forget_prefixes()
        if self.parts.worker.corpus is not None:
            with on_device(self.device):
                self.parts.worker.forget_answers()

    def abort(self, request: int | str) -> None:
        self._requests.abort(request)

    # -- records ----------------------------------------------------------------------------------------------

    def reset_record(self, *, rows: bool = True) -> None:
        self._requests.build()  # what has ended belongs to the window before
        tally = self._scorer.tally
        self._window = RecordWindow(self._runner, self.parts.worker, self.parts.scheduler.state_cache, tally, rows=rows)
        if len(self._requests):
            self._window.open(time.perf_counter())

    @property
    def iterations(self) -> int:
        """Decode steps launched in the window; `record` has it too, but takes some milliseconds a call."""
        return self._window.iterations

    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        self._requests.build()
        return self._window.record(self.config.as_dict(), dict(self.caps), concurrency, workload or {})

    def close(self) -> None:
        if self._state == "closed":
            return
        self._drop_work()
        self._state = "closed"
        self.parts.worker.close()
        if self._ranks is not None:
            self._ranks.close()
        self._watch = None  # it may refer to the model
        del self.parts, self._runner, self._scorer, self._schedule
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- inside -----------------------------------------------------------------------------------------------

    def _check_sharing(self, config: EngineConfig) -> None:
        """Refuse to share the weights with an engine that needs others."""
        if self._state == "closed":
            raise refuse("weights_of", "a closed engine", "share the weights of an open one")
        for name in ("model", "load_format", "seed", "tensor_parallel"):
            if getattr(config, name) != getattr(self.config, name):
                works = f"the weights are those of {name}={getattr(self.config, name)!r}; use the same"
                raise refuse("weights_of", f"{name}={getattr(config, name)}", works)

    def _step(self) -> bool:
        # After a part of a step scheduler, graphs and device would disagree.
        with DeferredInterrupts(once=True), on_device(self.device):
            try:
                return self._schedule.step()
            except RuntimeError as error:
                failed = self._runner.launch
                if not is_out_of_memory(error):
                    raise
                if not failed.can_shrink(self.parts.worker):
                    raise failed.error(self.plan) from error
            self._shrink(failed)  # here, because the frames of the error hold tensors
        return True

    def _shrink(self, failed: Launch) -> None:
        """Go on with a smaller batch after a launch that ran out of memory."""
        self._schedule.drop()
        self._free_memory()
        name, value, why = failed.shrink(self.parts.scheduler, self.parts.worker)
        self._free_memory()
        self.on_shrink(f"{name}: {value} ({why})")
        self.caps |= {name: value, "reasons": self.caps["reasons"] | {name: why}}

    def _free_memory(self) -> None:
        """Give memory that nothing uses any more back to the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _explain(self, error: BaseException, doing: str) -> None:
        """Raise an error that says more than this one, if there is one."""
        if is_out_of_memory(error):
            raise self.plan.out_of_memory(doing) from error
        if self._ranks is not None:
            self._ranks.explain(error)

    def _drop_work(self) -> None:
        """Drop requests that an error, a closed stream or a closed engine leaves unfinished."""
        self._requests.drop()
        if self._state == "closed":
            return
        self._schedule.drop()
        if not self._trusted:  # a planned pass may not have run, so that its pages hold anything
            self.parts.scheduler.forget_prefixes()
            self._trusted = True

    def _on_finish(self, completion: Completion, now: float) -> None:
        self._window.add(completion, now)
        if self._watch is not None and completion.is_complete:
            self._watch.add(completion.metrics.acceptance)
