"""The engine: prompts in, completions out. Owns the models, caches, scheduler and schedule."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch

from specbatch.algorithms import causes_of_low_acceptance
from specbatch.config import EngineConfig
from specbatch.core.async_copy import on_device
from specbatch.core.request import Completion, Request, SamplingParams
from specbatch.engine.async_stream import stream_in_thread
from specbatch.engine.builder import build
from specbatch.engine.open_requests import OpenRequests, StreamEvent
from specbatch.engine.prompt_reader import Message, Prompt, PromptReader
from specbatch.engine.ranks import EngineRanks
from specbatch.engine.record_window import RecordWindow
from specbatch.engine.runner import Runner
from specbatch.engine.schedules import SCHEDULES
from specbatch.engine.scoring import Likelihood, OnScore, Pair, Scorer
from specbatch.engine.submissions import Params, Submission, submissions
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.memory.planner import EXCLUSIVE, MemoryShare
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.progress import Report
from specbatch.records.low_acceptance import LowAcceptanceWarning
from specbatch.records.run_record import RunRecord
from specbatch.settings import foreign_names
from specbatch.weights import Log

Events = Generator[StreamEvent, None, None]
_ACCEPTS = foreign_names(
    {
        "sampling_params": "use params",
        "prompt_token_ids": "give lists of token ids as prompts",
        "use_tqdm": "use on_completion to report progress",
    }
)  # parameters of vLLM


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
        self._ranks: EngineRanks | None = None
        if config.tensor_parallel > 1:
            self._ranks = EngineRanks(config, share, None if weights_of is None else weights_of._ranks)
        parts = build(
            config,
            log,
            report or (lambda done, total: None),
            shared=shared,
            share=share,
            others=self._ranks,
        )
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
        self._state = "ready"  # or "busy" while a stream is open, or "closed"
        self._state_lock = threading.Lock()
        self._trusted = True
        speculation = config.speculation
        judged = speculation.drafted and speculation.simulate_accept_length is None
        causes = causes_of_low_acceptance(speculation.algorithm, config.load_format)
        # A diagnosis runs the model on this rank alone.
        diagnose = parts.diagnose if self._ranks is None else lambda completions: None
        self._watch = LowAcceptanceWarning(causes, log, diagnose) if judged else None
        self._prompts = PromptReader(self.tokenizer, self.model_config, parts.scheduler)
        self._requests = OpenRequests(parts.scheduler, self.tokenizer, self._prompts.end_tokens, self._on_finish)
        self.reset_record()

    # -- work -------------------------------------------------------------------------------------------------

    @_ACCEPTS
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = None,
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        request_ids: Iterable[str] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt (text, token ids or an `EmbeddedPrompt`); completions come in the order of the prompts,
        the samples of a prompt one after the other.

        `params`: one for all, or one per prompt. `concurrency`: keep at most that many requests submitted and
        unfinished; None submits all at once. `arrivals`: when each prompt arrives, in ascending seconds from now; its
        metrics count from there, including the time that `concurrency` or a running step keeps it waiting.
        `request_ids`: names of the prompts, for `abort` and the completions. `on_completion` is called as each one
        ends. All prompts of a list are checked before any work; an interruption drops unfinished requests.
        """
        done: dict[tuple[int, int], Completion] = {}
        stream = self.stream(
            prompts, params, concurrency=concurrency, arrivals=arrivals, request_ids=request_ids, text=False
        )
        with closing(stream) as events:
            for event in events:
                if event.completion is not None:
                    done[event.index, event.sample] = event.completion
                    if on_completion is not None:
                        on_completion(event.completion)
        return [done[key] for key in sorted(done)]

    @_ACCEPTS
    def stream(
        self,
        prompts: Iterable[Prompt],
        params: Params = None,
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        request_ids: Iterable[str] | None = None,
        text: bool = True,
    ) -> Events:
        """As `generate`, yielding tokens as they arrive on the host. One stream may be open at a time.

        A list of prompts is checked entirely before anything runs. Any other iterable is consumed lazily, as far as
        `concurrency` requests (None: twice `max_running`) are unfinished, with `params` and `request_ids` beside it;
        a prompt that cannot run then raises SpecbatchError when it is reached. `text=False` leaves the `text` of events
        empty and saves the time to decode it.
        """
        if concurrency is not None:
            at_least("concurrency", concurrency, 1)
        if arrivals is not None and (
            not isinstance(prompts, Sequence) or len(arrivals) != len(prompts) or sorted(arrivals) != list(arrivals)
        ):
            works = "give ascending seconds, one for each prompt of a list"
            raise refuse("arrivals", f"{len(arrivals)} times", works)
        self._require("ready")
        requests = submissions(prompts, params, request_ids, self._prompts.read)
        if concurrency is None:
            concurrency = sys.maxsize if isinstance(prompts, Sequence) else 2 * self.config.max_running
        return self._work(requests, concurrency, arrivals, text)

    @_ACCEPTS
    def stream_async(
        self,
        prompts: Iterable[Prompt],
        params: Params = None,
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        request_ids: Iterable[str] | None = None,
        text: bool = True,
    ) -> AsyncGenerator[StreamEvent, None]:
        """As `stream`, for `async for`: a thread runs the engine, so that the event loop is not blocked.

        Prompts of an iterable are read in that thread. Cancelling the task or closing the generator (`aclose`) drops
        unfinished requests and returns when the engine is ready for others. While a stream is open, other work on this
        engine raises SpecbatchError, and `abort` ends single requests.
        """
        how: dict[str, Any] = {"concurrency": concurrency, "arrivals": arrivals, "request_ids": request_ids}
        return stream_in_thread(lambda: self.stream(prompts, params, text=text, **how))

    @_ACCEPTS
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        concurrency: int | None = None,
        request_ids: Iterable[str] | None = None,
        thinking: bool | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """As `generate`, of a conversation or a list of them, rendered with the model's chat template.

        A message has a `role` and a `content`. `thinking` sets the template's `enable_thinking`; None leaves its
        default.
        """
        prompts = self._prompts.chats(messages, thinking)
        return self.generate(
            prompts, params, concurrency=concurrency, request_ids=request_ids, on_completion=on_completion
        )

    def _work(
        self, requests: Iterator[Submission], concurrency: int, arrivals: Sequence[float] | None, text: bool
    ) -> Events:
        with self._state_lock:
            self._require("ready")
            self._state = "busy"
        start = time.perf_counter()
        self._requests.begin(text=text)
        more, early = True, None  # a request that has not arrived yet
        try:
            while more or self._requests.pending:
                while more and len(self._requests) < concurrency:
                    item, early = early or next(requests, None), None
                    if item is None:
                        more = False
                        break
                    now = time.perf_counter()
                    arrived = now if arrivals is None else start + arrivals[item.index]
                    if arrived > now:
                        if self._requests.pending:
                            early = item
                            break
                        time.sleep(arrived - now)
                    self._window.open(arrived)
                    self._requests.submit(item, arrived)
                self._requests.handle_aborts()
                if len(self._requests) and not self._step() and not self._requests.has_events:
                    raise RuntimeError(f"{self._scheduler.unfinished} requests are unfinished and nothing can run")
                yield from self._requests.take_events()
                self._require("busy")
            while self._step():  # v2 may have a step in flight, for requests that have ended
                pass
            if self._watch is not None:
                with on_device(self.device):
                    self._watch.finish(self._window.examples)
        except (Exception, KeyboardInterrupt) as error:
            self._trusted = False
            yield from self._requests.take_events()  # keep what has ended by then
            if isinstance(error, torch.OutOfMemoryError):
                raise self.plan.out_of_memory("running prompts") from error
            if self._ranks is not None:
                self._ranks.explain(error)
            raise
        finally:
            self._drop_work()
            if self._state == "busy":
                self._state = "ready"

    def check(self, tokens: Sequence[int], params: SamplingParams, index: int = 0) -> None:
        """Refuse a prompt that can never run: empty, too long with its output, or with ids outside the vocabulary."""
        self._prompts.check(tokens, params, index)

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

    def abort(self, request: int | str) -> None:
        """End all samples of the prompt with that index or request id, before the next step; their completions so far
        follow with finish_reason "abort". Any thread may call this while a stream is open."""
        self._requests.abort(request)

    # -- records ----------------------------------------------------------------------------------------------

    def reset_record(self, *, rows: bool = True) -> None:
        """Start a new measured window: with the next submission, or now if requests are under way.

        Without `rows`, `record().requests` stays empty, and memory does not grow with the number of requests.
        """
        tally = self._scorer.tally
        self._window = RecordWindow(self._runner, self._worker, self._scheduler.state_cache, tally, rows=rows)
        if len(self._requests):
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
        if self._ranks is not None:
            self._ranks.close()
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
        for name in ("model", "load_format", "seed", "tensor_parallel"):
            if getattr(config, name) != getattr(self.config, name):
                works = f"the weights are those of {name}={getattr(self.config, name)!r}; use the same"
                raise refuse("weights_of", f"{name}={getattr(config, name)}", works)

    def _step(self) -> bool:
        with on_device(self.device):
            return self._schedule.step()

    def _drop_work(self) -> None:
        """Drop requests that an error, a closed stream or a closed engine leaves unfinished."""
        self._requests.drop()
        if self._state != "closed":
            self._schedule.drop()
        if not self._trusted:  # a planned pass may not have run, so that its pages hold anything
            self._scheduler.forget_prefixes()
            self._trusted = True

    def _on_tokens(self, request: Request, tokens: list[int]) -> None:
        if request.last_token is not None:  # else it failed before its first token
            self._window.add_tokens(request.last_token, len(tokens))
        self._requests.add_tokens(request, tokens)

    def _on_finish(self, completion: Completion, now: float) -> None:
        self._window.add(completion, now)
        if self._watch is not None and completion.is_complete:
            self._watch.add(completion.metrics.acceptance)
