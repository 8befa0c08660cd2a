"""The interface of engines: prompts in, completions out, whether one engine runs them or many replicas."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self

from specbatch.config.engine_config import EngineConfig
from specbatch.config.settings import foreign_names
from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.requests.async_stream import stream_in_thread
from specbatch.engine.requests.open_requests import Detail, StreamEvent
from specbatch.engine.requests.prompt_reader import Message, Prompt, PromptReader
from specbatch.engine.requests.submissions import Params, Source, TimedSource, submissions
from specbatch.engine.scoring import Likelihood, OnScore, Pair
from specbatch.errors import SpecbatchError, at_least, refuse
from specbatch.records.run_record import RunRecord
from specbatch.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

Events = Generator[StreamEvent, None, None]
_ACCEPTS = foreign_names(
    {
        "sampling_params": "use params",
        "prompt_token_ids": "give lists of token ids as prompts",
        "use_tqdm": "use on_completion to report progress",
    }
)  # parameters of vLLM


class InferenceEngine(ABC):
    """Runs prompts on a model.

    config   as asked for, with what the draft and the memory decide
    caps     what it can hold at most
    on_prefill  called with the number of prompt tokens of each prefill pass, to show progress. Replicas, which are
             other processes, do not call it
    """

    config: EngineConfig
    caps: dict[str, Any]
    on_prefill: Callable[[int], None]
    tokenizer: Tokenizer
    _prompts: PromptReader

    def __init__(self) -> None:
        self._state = "ready"  # or "busy" while a stream is open, or "closed"
        self._state_lock = threading.Lock()
        self.on_prefill = lambda tokens: None

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

        Sampled requests without a `seed` get one from the engine's seed and the index of their prompt, so that the same
        call samples the same answers again. Their completions and their rows in the record have `seed` None.
        """
        done: dict[tuple[int, int], Completion] = {}
        stream = self._open(prompts, params, concurrency, arrivals, request_ids, "completions")
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
        `concurrency` requests (None: twice `max_running`) are unfinished, together with `params` and `request_ids`;
        a prompt that cannot run then raises SpecbatchError when it is reached. `text=False` leaves the `text` of events
        empty and saves the time to decode it.
        """
        return self._open(prompts, params, concurrency, arrivals, request_ids, "text" if text else "tokens")

    def _open(
        self,
        prompts: Iterable[Prompt],
        params: Params,
        concurrency: int | None,
        arrivals: Sequence[float] | None,
        request_ids: Iterable[str] | None,
        detail: Detail,
    ) -> Events:
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
            lazy = 2 * self.caps["max_running"] * self.config.data_parallel
            concurrency = sys.maxsize if isinstance(prompts, Sequence) else lazy
        return self._work(TimedSource(requests, arrivals), concurrency, detail)

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

    def check(self, tokens: Sequence[int], params: SamplingParams, index: int | None = None) -> None:
        """Refuse a prompt that can never run: empty, too long with its output, or with ids outside the vocabulary.

        index: its place among the prompts, from 0, as messages name it; None: the caller says which prompt it is
        """
        self._prompts.check(tokens, params, index)

    @abstractmethod
    def score(self, pairs: Sequence[Pair], *, on_score: OnScore | None = None) -> list[Likelihood]:
        """Log-likelihood of each continuation after its context: pairs of two non-empty lists of token ids.

        The target runs alone, whatever `speculation` is: nothing is drafted for given texts. Texts go through it as
        prompts do; the prefix cache is emptied. The last token, which nothing follows, does not count in
        `max_model_len`. `on_score` is called with the index of each pair as it ends.
        """

    @abstractmethod
    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits float32 [V] on the host of the token after `tokens`, from a normal prefill pass."""

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and remove the answers of this run from the corpus, so that the next measurement
        starts without what earlier requests left."""

    @abstractmethod
    def abort(self, request: int | str) -> None:
        """End all samples of the prompt with that index or request id, before the next step; their completions so far
        follow with finish_reason "abort". Any thread may call this while a stream is open. An index or id that the
        stream does not have, or whose prompt has ended, is ignored: it may have ended just before the call."""

    # -- records ----------------------------------------------------------------------------------------------

    @abstractmethod
    def reset_record(self, *, rows: bool = True) -> None:
        """Start a new measured window: with the next submission, or now if requests are under way.

        Without `rows`, `record().requests` stays empty, and memory does not grow with the number of requests.
        """

    @abstractmethod
    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        """All work since the engine was built or `reset_record` was called."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory of model and caches. The engine cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _work(self, source: Source, concurrency: int, detail: Detail) -> Events:
        """Run what the source has, at most `concurrency` requests at a time."""

    def _require(self, state: str) -> None:
        if self._state == state:
            return
        if self._state == "closed":
            raise SpecbatchError("the engine is closed: build a new one")
        raise SpecbatchError("the engine is busy: finish or close the open stream first")
