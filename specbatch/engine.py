"""The engine: owns model, caches, drafter and schedule; prompts go in, completions come out."""

from __future__ import annotations

import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from specbatch import weights
from specbatch.batch import DeviceBatch
from specbatch.config import EngineConfig
from specbatch.drafters import ALGORITHMS
from specbatch.drafters.base import DraftPlan
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.iteration import Iteration
from specbatch.memory.kv_cache import bytes_per_page
from specbatch.memory.pages import PagePool, pages_for, reach_of
from specbatch.memory.plan import MemoryPlan, available_memory, plan_memory
from specbatch.memory.prefix_cache import PrefixCache
from specbatch.metrics import RunRecord, emitted_histogram, summarize
from specbatch.models.config import ModelConfig
from specbatch.models.llama import Llama
from specbatch.models.loader import Loader, weight_bytes
from specbatch.prefill import PromptPass
from specbatch.request import Completion, Request, SamplingParams
from specbatch.runner import Counters, Runner
from specbatch.scheduler import Scheduler
from specbatch.schedules import SCHEDULES

Prompt = str | list[int]
Params = SamplingParams | Sequence[SamplingParams] | None
Events = Generator["StreamEvent", None, None]


@dataclass(frozen=True)
class StreamEvent:
    """New tokens of the prompt at `index`; its `completion` on the last event, else None."""

    index: int
    token_ids: list[int]
    completion: Completion | None


class Engine:
    """Runs prompts on one model in this process. `log` gets lines such as the memory plan, before the weights load.

    `weights_of`: an open engine whose target weights are used in place of a copy of one's own.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log: Callable[[str], None] | None = None,
        weights_of: Engine | None = None,
    ) -> None:
        self.config = config
        say = log or (lambda line: None)
        self.device = find_device(config.device)
        target = weights.open_checkpoint(
            config.model, config.load_format, seed=config.seed, tokenizer=config.tokenizer, log=say
        )
        self.tokenizer = target.tokenizer()
        dtype = _dtype(config.dtype, target.config.dtype, self.device)
        if weights_of is not None:
            weights_of._check_sharing(config, dtype, self.device)
        shared = "" if weights_of is None else ", weights shared"
        say(f"model: {target.name} ({target.origin}), {_name(dtype)} on {self.device}{shared}; {target.config.rope}")
        draft: DraftPlan = import_module(ALGORITHMS[config.speculation.algorithm]).plan(target, config, say)
        rows = config.speculation.drafted + 1
        plan = plan_memory(
            config,
            free=available_memory(self.device),
            on_cpu=self.device.type == "cpu",
            model_len=min(target.config.max_position, draft.config.max_position),
            weights=0 if weights_of is not None else weight_bytes(target.config, dtype, self.device),
            draft_weights=weight_bytes(draft.weights, dtype, self.device) if draft.weights else 0,
            page_bytes=bytes_per_page(target.config, target.config.num_layers, config.page_size, dtype)
            + bytes_per_page(draft.config, draft.kv_layers, config.page_size, dtype),
            vocabulary=target.config.vocab_size,
            rows=rows,
        )
        say(f"speculation: {config.speculation}")
        for line in plan.lines():
            say(line)

        width = reach_of(plan.max_model_len, rows) + 1
        loader = Loader(dtype, self.device, width, plan.kv_pages, config.page_size)
        model = loader.model(target) if weights_of is None else weights_of._model.with_positions(width)
        self._model: Llama = model
        cache = loader.cache(model)
        drafter = draft.build(model, loader)
        batch = DeviceBatch(config.max_running, width, pages_for(width, config.page_size), self.device)
        pool = PagePool(plan.kv_pages)
        self._scheduler = Scheduler(
            pool,
            PrefixCache(pool, config.page_size) if config.prefix_cache else None,
            page_size=config.page_size,
            max_running=config.max_running,
            max_model_len=plan.max_model_len,
            prefill_chunk=config.prefill_chunk,
            rows=rows,
        )
        self._runner = Runner(
            self._scheduler,
            batch,
            Iteration(model, cache, drafter, config.speculation.simulate_accept_length),
            PromptPass(model, cache, drafter),
            page_size=config.page_size,
            seed=config.seed,
            on_tokens=self._on_tokens,
        )
        self._schedule = SCHEDULES[config.speculation.schedule](self._runner)
        self.plan: MemoryPlan = plan
        self.caps: dict[str, Any] = {
            "device": str(self.device),
            "dtype": _name(dtype),
            "max_running": config.max_running,
            "max_model_len": plan.max_model_len,
            "kv_pages": plan.kv_pages,
            "page_size": config.page_size,
            "prefill_chunk": config.prefill_chunk,
            "verify_rows": rows,
            "weights_bytes": plan.weights + plan.draft_weights,
            "kv_bytes": plan.kv,
        }
        self._active: dict[int, Request] = {}
        self._aborted: set[int] = set()
        self._events: list[StreamEvent] = []
        self._state = "ready"  # or "busy" while a stream is open, or "closed"
        self._trusted = True
        self.model_config: ModelConfig = target.config
        self._vocabulary = target.config.vocab_size
        self._end_tokens = frozenset(self.tokenizer.eos_ids)
        self.reset_record()

    # -- work -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        concurrency: int | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt (text or token ids); completions come in the order of the prompts.

        `params`: one for all, or one per prompt. `concurrency`: keep at most that many requests submitted and
        unfinished; None submits all at once. `on_completion` is called as each one ends. All prompts are checked
        before any work; an interruption drops what is unfinished.
        """
        done: dict[int, Completion] = {}
        with closing(self.stream(prompts, params, concurrency=concurrency)) as events:
            for event in events:
                if event.completion is not None:
                    done[event.index] = event.completion
                    if on_completion is not None:
                        on_completion(event.completion)
        return [done[index] for index in range(len(prompts))]

    def stream(self, prompts: Sequence[Prompt], params: Params = None, *, concurrency: int | None = None) -> Events:
        """As `generate`, handing tokens over as the host learns of them. One stream may be open at a time."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise refuse("prompts", prompts, "give a list of prompts, for example [prompt]")
        if concurrency is not None:
            at_least("concurrency", concurrency, 1)
        self._require("ready")
        settings = self._settings(params, len(prompts))
        tokens = [self._encode(index, prompt) for index, prompt in enumerate(prompts)]
        for index, (ids, setting) in enumerate(zip(tokens, settings, strict=True)):
            self._check(index, ids, setting)
        return self._work(tokens, settings, concurrency or len(tokens))

    def _work(self, tokens: list[list[int]], settings: list[SamplingParams], concurrency: int) -> Events:
        self._require("ready")
        self._state = "busy"
        self._aborted.clear()
        waiting = deque(range(len(tokens)))
        try:
            while waiting or self._active or self._events:
                while waiting and len(self._active) < concurrency:
                    index = waiting.popleft()
                    self._submit(index, tokens[index], settings[index])
                    if index in self._aborted:
                        self.abort(index)
                if self._active and not self._schedule.step() and not self._events:
                    raise RuntimeError(f"{self._scheduler.unfinished} requests are unfinished and nothing can run")
                yield from self._take_events()
                self._require("busy")
            while self._schedule.step():  # what v2 still has in flight: void rows of requests that have ended
                pass
        except (Exception, KeyboardInterrupt):
            self._trusted = False
            yield from self._take_events()  # what had ended by then is not lost
            raise
        finally:
            self._drop_work()
            if self._state == "busy":
                self._state = "ready"

    def abort(self, index: int) -> None:
        """End the request of that prompt; its completion so far follows with finish_reason "abort"."""
        request = self._active.get(index)
        if request is None:
            self._aborted.add(index)  # it may still wait for its turn
        else:
            self._end(request, "abort")
            self._finish(request, [])

    # -- records ----------------------------------------------------------------------------------------------

    def reset_record(self) -> None:
        """Start a new measured window."""
        self._completions: list[Completion] = []
        self._opened: float | None = None
        self._closed = 0.0
        self._per_second: Counter[int] = Counter()  # output tokens, by second of the window
        self._counters = self._runner.counters = Counters()

    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        """All work since the engine was made or `reset_record` was called."""
        window = self._closed - self._opened if self._opened is not None else 0.0
        metrics = summarize(self._completions, window, concurrency)
        metrics["peak_output_throughput"] = float(max(self._per_second.values(), default=0)) or None
        counters: dict[str, Any] = asdict(self._counters)
        counters["emitted_histogram"] = emitted_histogram(self._completions)
        return RunRecord(
            config=self.config.as_dict(),
            caps=dict(self.caps),
            metrics=metrics,
            counters=counters,
            requests=[item.as_row() for item in self._completions],
            workload=workload or {},
        )

    def close(self) -> None:
        """Free the memory of model and caches. The engine cannot be used afterwards."""
        if self._state == "closed":
            return
        self._drop_work()
        self._state = "closed"
        del self._runner, self._schedule, self._model
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
        raise SpecbatchError("the engine is busy: finish or close the stream that is open before the next one")

    def _check_sharing(self, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse to lend the weights to an engine that asks for others."""
        if self._state == "closed":
            raise refuse("weights_of", "a closed engine", "share the weights of an open one")
        if (dtype, device) != (self._model.dtype, self._model.device):
            works = f"the weights are {_name(self._model.dtype)} on {self._model.device}; ask for the same"
            raise refuse("weights_of", f"{_name(dtype)} on {device}", works)
        for name in ("model", "load_format", "seed"):
            if getattr(config, name) != getattr(self.config, name):
                works = f"the weights are those of {name}={getattr(self.config, name)!r}; ask for the same"
                raise refuse("weights_of", f"{name}={getattr(config, name)}", works)

    def _take_events(self) -> list[StreamEvent]:
        events, self._events = self._events, []
        return events

    def _drop_work(self) -> None:
        """Forget what an error, a closed stream or a closed engine leaves unfinished."""
        for request in list(self._active.values()):
            self._end(request, "abort")
        self._events.clear()
        if self._state != "closed":
            self._schedule.drop()
        if not self._trusted:  # a pass that was planned may not have run: its pages hold anything
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

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise refuse(f"prompt {index}", f"{prompt!r:.60}", "give text or a list of token ids") from None

    def _check(self, index: int, tokens: list[int], params: SamplingParams) -> None:
        self._scheduler.check(len(tokens), params.max_new_tokens, index)
        wrong = [token for token in tokens if not 0 <= token < self._vocabulary]
        if wrong:
            raise refuse(f"prompt {index}", f"token {wrong[0]}", f"token ids go from 0 to {self._vocabulary - 1}")

    def _submit(self, index: int, tokens: list[int], params: SamplingParams) -> None:
        now = time.perf_counter()
        if self._opened is None:
            self._opened = now
        decode = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        request = Request(index, tokens, params, end_tokens=self._end_tokens, decode=decode, submitted=now)
        self._active[index] = request
        self._scheduler.add(request)

    def _on_tokens(self, request: Request, tokens: list[int]) -> None:
        assert request.last_token is not None
        assert self._opened is not None
        self._per_second[int(request.last_token - self._opened)] += len(tokens)
        if request.finished:
            self._finish(request, tokens)
        else:
            self._events.append(StreamEvent(request.index, tokens, None))

    def _finish(self, request: Request, tokens: list[int]) -> None:
        now = time.perf_counter()
        completion = request.completion(now)
        self._closed = now
        self._active.pop(request.index, None)
        self._completions.append(completion)
        self._events.append(StreamEvent(request.index, tokens, completion))

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._scheduler.release(request)
        self._active.pop(request.index, None)


def find_device(name: str) -> torch.device:
    """The device that `name` (auto, cpu, cuda, cuda:N) means here; refused where there is none such."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise refuse("device", name, "torch sees no CUDA device here; use cpu or auto")
        index = int(name[5:] or 0) if ":" in name else 0
        if index >= torch.cuda.device_count():
            raise refuse("device", name, f"there are {torch.cuda.device_count()} CUDA devices; count from 0")
        return torch.device("cuda", index)
    return torch.device(name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else stored or "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
