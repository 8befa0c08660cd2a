"""What an engine runs: prompts with their sampling parameters and request ids, from lists, iterables or a queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specbatch.core.embedded_prompt import EmbeddedPrompt
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.requests.prompt_reader import Prompt
from specbatch.errors import refuse

Params = SamplingParams | Iterable[SamplingParams] | None
Prepare = Callable[[Prompt, SamplingParams, int], EmbeddedPrompt]


@dataclass(frozen=True)
class Submission:
    """One sample of a prompt that can run. index: of the prompt."""

    index: int
    sample: int
    prompt: EmbeddedPrompt
    params: SamplingParams
    request_id: str | None


class Source(Protocol):
    """Submissions as an engine takes them.

    is_open   whether there may be another one
    """

    @property
    def is_open(self) -> bool: ...

    def take(self) -> tuple[Submission, float] | None:
        """The next submission and the time it arrived (`time.perf_counter`); None if none has arrived by now."""

    def wait(self) -> None:
        """Return when another one may have arrived."""


class TimedSource:
    """The submissions of a list or iterable, which arrive when they are taken, or at given times."""

    def __init__(self, items: Iterator[Submission], arrivals: Sequence[float] | None) -> None:
        """arrivals: of each prompt, in seconds from the first `take`."""
        self._items = items
        self._arrivals = arrivals
        self._start: float | None = None
        self._early: Submission | None = None  # it has not arrived yet
        self.is_open = True

    def take(self) -> tuple[Submission, float] | None:
        item, self._early = self._early or next(self._items, None), None
        if item is None:
            self.is_open = False
            return None
        now = time.perf_counter()
        self._start = now if self._start is None else self._start
        arrival = now if self._arrivals is None else self._start + self._arrivals[item.index]
        if arrival > now:
            self._early = item
            return None
        return item, arrival

    def wait(self) -> None:
        if self._early is not None and self._arrivals is not None and self._start is not None:
            time.sleep(max(0.0, self._start + self._arrivals[self._early.index] - time.perf_counter()))


class SubmissionQueue:
    """Submissions that another thread adds while the engine runs."""

    def __init__(self) -> None:
        self._items: deque[tuple[Submission, float]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def is_open(self) -> bool:
        return not self._closed or bool(self._items)

    def put(self, items: Iterable[tuple[Submission, float]]) -> None:
        """Add submissions with their times of arrival."""
        with self._changed:
            self._items.extend(items)
            self._changed.notify()

    def close(self, *, drop: bool = False) -> None:
        """There will be no others. drop: forget those that were not taken."""
        with self._changed:
            self._closed = True
            if drop:
                self._items.clear()
            self._changed.notify()

    def take(self) -> tuple[Submission, float] | None:
        return self._items.popleft() if self._items else None

    def wait(self) -> None:
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()


def submissions(
    prompts: Iterable[Prompt], params: Params, request_ids: Iterable[str] | None, prepare: Prepare
) -> Iterator[Submission]:
    """The samples of all prompts, in order. prepare: encodes and checks the prompt with an index.

    A list of prompts is checked entirely before this returns. Anything else is consumed lazily, together with
    `params` and `request_ids`; a prompt that cannot run then raises SpecbatchError when it is reached.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise refuse("prompts", prompts, "give a list of prompts, for example [prompt]")
    if isinstance(params, Mapping) or not isinstance(params, SamplingParams | Iterable | None):
        raise refuse("params", type(params).__name__, "give one SamplingParams, or a list of them")
    if isinstance(request_ids, str):
        raise refuse("request_ids", request_ids, "give a list, one for each prompt")
    if not isinstance(prompts, Sequence):
        return _samples(prompts, params, request_ids, prepare)
    params = _as_many("params", params, len(prompts), "give one SamplingParams, or one")
    request_ids = _as_many("request_ids", request_ids, len(prompts), "give one")
    if request_ids is not None and len(set(request_ids)) < len(prompts):
        raise refuse("request_ids", len(prompts), "each prompt needs an id of its own, and one is repeated")
    return _drained(deque(_samples(prompts, params, request_ids, prepare)))


def _samples(
    prompts: Iterable[Prompt], params: Params, request_ids: Iterable[str] | None, prepare: Prepare
) -> Iterator[Submission]:
    each = None if params is None or isinstance(params, SamplingParams) else iter(params)
    names = None if request_ids is None else iter(request_ids)
    default = params if isinstance(params, SamplingParams) else SamplingParams()
    for index, prompt in enumerate(prompts):
        own = default if each is None else _next("params", each, index)
        if not isinstance(own, SamplingParams):
            raise refuse("params", type(own).__name__, "give one SamplingParams, or a list of them")
        name = None if names is None else _next("request_ids", names, index)
        if not isinstance(name, str | None):
            raise refuse("request_ids", name, "use texts")
        prepared = prepare(prompt, own, index)
        for sample in range(own.n):
            yield Submission(index, sample, prepared, own, name)


def _as_many(setting: str, values: Any, count: int, works: str) -> Any:
    """Values for `count` prompts as a list; one for all stays what it is."""
    if values is None or isinstance(values, SamplingParams):
        return values
    found = list(values)
    if len(found) != count:
        raise refuse(setting, len(found), f"{works} for each of the {count} prompts")
    return found


def _next(setting: str, values: Iterator[Any], index: int) -> Any:
    for value in values:
        return value
    raise refuse(setting, index, "there are more prompts than that; give one for each")


def _drained(items: deque[Submission]) -> Iterator[Submission]:
    """Each item once; it is not kept."""
    while items:
        yield items.popleft()
