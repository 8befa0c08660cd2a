"""The engine: prompts in, completions out. Owns the models, caches, scheduler and schedule."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specbatch.algorithms import causes_of_low_acceptance
from specbatch.config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.core.embedded_prompt import EmbeddedPrompt
from specbatch.core.request import Completion, Request, SamplingParams
from specbatch.engine.builder import build
from specbatch.engine.record_window import RecordWindow
from specbatch.engine.runner import Runner
from specbatch.engine.schedules import SCHEDULES
from specbatch.engine.scoring import Likelihood, OnScore, Pair, Scorer
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.progress import Report
from specbatch.records.low_acceptance import LowAcceptanceWarning
from specbatch.records.run_record import RunRecord
from specbatch.weights import Log

Prompt = str | list[int] | EmbeddedPrompt
Params = SamplingParams | Sequence[SamplingParams] | None
Events = Generator["StreamEvent", None, None]


@dataclass(frozen=True)
class StreamEvent:
    """New tokens of the prompt at `index`; its `completion` on the last event, else None."""

    index: int
    token_ids: list[int]
    completion: Completion | None


class Engine:
    """Runs prompts on one model in this process. `log` is called with lines such as the memory plan, before the weights
    are loaded.

    `report` is called with the progress of recording graphs. `weights_of`: an open engine whose target weights are used
    in place of a copy of one's own. `share`: this engine's part of the memory, if several are built one after the
    other.
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
        log = log or (lambda line: None)
        if weights_of is not None:
            weights_of._check_sharing(config)
        shared = None if weights_of is None else weights_of._model
        parts = build(config, log, report or (lambda done, total: None), shared=shared, share=share)
        self.config = parts.config
        self.device = parts.device
        self.tokenizer = parts.tokenizer
        self.plan = parts.plan
        self.caps = parts.caps
        self.model_config: ModelConfig = parts.model.config
        self._model: Decoder = parts.model
        self._scheduler = parts.scheduler
        self._worker = parts.worker
        self._runner = Runner(
            parts.scheduler,
            parts.worker,
            parts.draft_length,
            idle_at_zero=parts.draft.idle_at_zero,
            depth=parts.config.speculation.depth,
            chunk=config.prefill_chunk,
            seed=config.seed,
            on_tokens=self._on_tokens,
        )
        self._schedule = SCHEDULES[config.speculation.schedule](self._runner)
        self._scorer = Scorer(
            parts.worker,
            parts.plan,
            vocabulary=self.model_config.vocab_size,
            chunk=config.prefill_chunk,
            shares=parts.config.prefix_cache and not parts.model.recurrent_layers,
        )
        self._active: dict[int, Request] = {}
        self._aborted: set[int] = set()
        self._events: list[StreamEvent] = []
        self._state = "ready"  # or "busy" while a stream is open, or "closed"
        self._trusted = True
        speculation = config.speculation
        judged = speculation.drafted and speculation.simulate_accept_length is None
        causes = causes_of_low_acceptance(speculation.algorithm, config.load_format)
        self._watch = LowAcceptanceWarning(causes, log, parts.diagnose) if judged else None
        self._end_tokens = frozenset(self.tokenizer.eos_ids)
        self.reset_record()

    # -- work -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt (text, token ids or an `EmbeddedPrompt`); completions come in the order of the prompts.

        `params`: one for all, or one per prompt. `concurrency`: keep at most that many requests submitted and
        unfinished; None submits all at once. `arrivals`: when each prompt arrives, in ascending seconds from now; its
        metrics count from there, including the time that `concurrency` or a running step keeps it waiting.
        `on_completion` is called as each one ends. All prompts are checked before any work; an interruption drops
        unfinished requests.
        """
        done: dict[int, Completion] = {}
        with closing(self.stream(prompts, params, concurrency=concurrency, arrivals=arrivals)) as events:
            for event in events:
                if event.completion is not None:
                    done[event.index] = event.completion
                    if on_completion is not None:
                        on_completion(event.completion)
        return [done[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
    ) -> Events:
        """As `generate`, yielding tokens as they arrive on the host. One stream may be open at a time."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise refuse("prompts", prompts, "give a list of prompts, for example [prompt]")
        if concurrency is not None:
            at_least("concurrency", concurrency, 1)
        if arrivals is not None and (len(arrivals) != len(prompts) or sorted(arrivals) != list(arrivals)):
            raise refuse("arrivals", f"{len(arrivals)} times", f"give {len(prompts)} ascending seconds, one per prompt")
        self._require("ready")
        settings = self._settings(params, len(prompts))
        encoded = [self._encode(index, prompt) for index, prompt in enumerate(prompts)]
        for index, (prompt, setting) in enumerate(zip(encoded, settings, strict=True)):
            self.check(prompt.token_ids, setting, index)
        return self._work(encoded, settings, concurrency or len(encoded), arrivals)

    def _work(
        self,
        prompts: list[EmbeddedPrompt],
        settings: list[SamplingParams],
        concurrency: int,
        arrivals: Sequence[float] | None,
    ) -> Events:
        self._require("ready")
        start = time.perf_counter()
        self._state = "busy"
        self._aborted.clear()
        waiting = deque(range(len(prompts)))
        try:
            while waiting or self._active or self._events:
                while waiting and len(self._active) < concurrency:
                    now = time.perf_counter()
                    arrived = now if arrivals is None else start + arrivals[waiting[0]]
                    if (early := arrived - now) > 0:
                        if self._active or self._events:
                            break
                        time.sleep(early)
                    index = waiting.popleft()
                    self._submit(index, prompts[index], settings[index], arrived)
                    if index in self._aborted:
                        self.abort(index)
                if self._active and not self._step() and not self._events:
                    raise RuntimeError(f"{self._scheduler.unfinished} requests are unfinished and nothing can run")
                yield from self._take_events()
                self._require("busy")
            while self._step():  # v2 may have a step in flight, for requests that have ended
                pass
            if self._watch is not None:
                with on_device(self.device):
                    ended = [item for item in self._window.completions if item.is_complete]
                    self._watch.finish([item for item in ended if not item.metrics.embedded_tokens])
        except (Exception, KeyboardInterrupt) as error:
            self._trusted = False
            yield from self._take_events()  # keep what has ended by then
            if isinstance(error, torch.OutOfMemoryError):
                raise self.plan.out_of_memory("running prompts") from error
            raise
        finally:
            self._drop_work()
            if self._state == "busy":
                self._state = "ready"

    def check(self, tokens: Sequence[int], params: SamplingParams, index: int = 0) -> None:
        """Refuse a prompt that can never run: empty, too long with its output, or with ids outside the vocabulary."""
        self._scheduler.check(len(tokens), params.max_new_tokens, index)
        wrong = [token for token in tokens if not 0 <= token < self.model_config.vocab_size]
        if wrong:
            raise refuse(
                f"prompt {index}", f"token {wrong[0]}", f"token ids go from 0 to {self.model_config.vocab_size - 1}"
            )

    def score(self, pairs: Sequence[Pair], *, on_score: OnScore | None = None) -> list[Likelihood]:
        """Log-likelihood of each continuation after its context: pairs of two non-empty lists of token ids.

        The target runs alone, whatever `speculation` is: nothing is drafted for given texts. Texts go through it as
        prompts do; the prefix cache is emptied. The last token, which nothing follows, does not count in
        `max_model_len`. `on_score` is called with the index of each pair as it ends.
        """
        self.forget_prefixes()
        self._state = "busy"
        try:
            with on_device(self.device):
                return self._scorer.score(self._scorer.checked(pairs), on_score)
        except torch.OutOfMemoryError as error:
            raise self.plan.out_of_memory("scoring") from error
        finally:
            self._state = "ready"

    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits float32 [V] on the host of the token after `tokens`, from a normal prefill pass."""
        seen: list[torch.Tensor] = []
        self._worker.prefill_step.on_logits = lambda logits: seen.append(logits[0].float().cpu())
        try:
            self.generate([tokens], SamplingParams(max_new_tokens=1))
        finally:
            self._worker.prefill_step.on_logits = None
        return seen[0]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that the next measurement starts without cached prefixes."""
        self._require("ready")
        self._scheduler.forget_prefixes()

    def abort(self, index: int) -> None:
        """End the request of that prompt; its completion so far follows with finish_reason "abort"."""
        request = self._active.get(index)
        if request is None:
            self._aborted.add(index)  # it may not be submitted yet
        else:
            self._end(request, "abort")
            self._finish(request, [])

    # -- records ----------------------------------------------------------------------------------------------

    def reset_record(self) -> None:
        """Start a new measured window: with the next submission, or now if requests are under way."""
        self._window = RecordWindow(self._runner, self._worker, self._scheduler.state_cache, self._scorer.tally)
        if self._active:
            self._window.open(time.perf_counter())

    @property
    def iterations(self) -> int:
        """Decode steps launched in the window; `record` has it too, but takes some milliseconds a call."""
        return self._window.iterations

    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        """All work since the engine was built or `reset_record` was called."""
        return self._window.record(self.config.as_dict(), dict(self.caps), concurrency, workload or {})

    def close(self) -> None:
        """Free the memory of model and caches. The engine cannot be used afterwards."""
        if self._state == "closed":
            return
        self._drop_work()
        self._state = "closed"
        self._worker.close()
        self._watch = None  # it may refer to the model
        del self._worker, self._runner, self._scorer, self._schedule, self._model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _require(self, state: str) -> None:
        if self._state == state:
            return
        if self._state == "closed":
            raise SpecbatchError("the engine is closed: build a new one")
        raise SpecbatchError("the engine is busy: finish or close the open stream first")

    def _check_sharing(self, config: EngineConfig) -> None:
        """Refuse to share the weights with an engine that needs others."""
        if self._state == "closed":
            raise refuse("weights_of", "a closed engine", "share the weights of an open one")
        for name in ("model", "load_format", "seed"):
            if getattr(config, name) != getattr(self.config, name):
                works = f"the weights are those of {name}={getattr(self.config, name)!r}; use the same"
                raise refuse("weights_of", f"{name}={getattr(config, name)}", works)

    def _step(self) -> bool:
        with on_device(self.device):
            return self._schedule.step()

    def _take_events(self) -> list[StreamEvent]:
        events, self._events = self._events, []
        return events

    def _drop_work(self) -> None:
        """Drop requests that an error, a closed stream or a closed engine leaves unfinished."""
        for request in list(self._active.values()):
            self._end(request, "abort")
        self._events.clear()
        if self._state != "closed":
            self._schedule.drop()
        if not self._trusted:  # a planned pass may not have run, so that its pages hold anything
            self._scheduler.forget_prefixes()
            self._trusted = True

    def _settings(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        wrong = [params] if isinstance(params, dict) else [x for x in params if not isinstance(x, SamplingParams)]
        if wrong:
            raise refuse("params", type(wrong[0]).__name__, "give one SamplingParams, or a list of them")
        if len(params) != count:
            raise refuse("params", len(params), f"give one SamplingParams, or one for each of the {count} prompts")
        return list(params)

    def _encode(self, index: int, prompt: Prompt) -> EmbeddedPrompt:
        if isinstance(prompt, str):
            return EmbeddedPrompt(self.tokenizer.encode(prompt))
        asked = prompt if isinstance(prompt, EmbeddedPrompt) else EmbeddedPrompt(prompt)
        return asked.checked(index, self.model_config.hidden_size)

    def _submit(self, index: int, prompt: EmbeddedPrompt, params: SamplingParams, arrived: float) -> None:
        self._window.open(arrived)
        decode = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        request = Request(
            index,
            list(prompt.token_ids),
            params,
            end_tokens=self._end_tokens,
            decode=decode,
            submitted=arrived,
            embeddings=prompt.embeddings,
        )
        self._active[index] = request
        self._scheduler.add(request)

    def _on_tokens(self, request: Request, tokens: list[int]) -> None:
        if request.last_token is not None:  # else it failed before its first token
            self._window.add_tokens(request.last_token, len(tokens))
        if request.finished:
            self._finish(request, tokens)
        else:
            self._events.append(StreamEvent(request.index, tokens, None))

    def _finish(self, request: Request, tokens: list[int]) -> None:
        now = time.perf_counter()
        completion = request.completion(now)
        self._active.pop(request.index, None)
        self._window.add(completion, now)
        if self._watch is not None and completion.is_complete:
            self._watch.add(completion.metrics.acceptance)
        self._events.append(StreamEvent(request.index, tokens, completion))

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._scheduler.release(request)
        self._active.pop(request.index, None)
