"""Pairs the prompts of a call with their sampling parameters and request ids, from lists or lazily from iterables."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbatch.core.embedded_prompt import EmbeddedPrompt
from specbatch.core.request import SamplingParams
from specbatch.engine.prompt_reader import Prompt
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


def submissions(
    prompts: Iterable[Prompt], params: Params, request_ids: Iterable[str] | None, prepare: Prepare
) -> Iterator[Submission]:
    """The samples of all prompts, in order. prepare: encodes and checks the prompt with an index.

    A list of prompts is checked entirely before this returns. Anything else is consumed lazily, with `params` and
    `request_ids` beside it; a prompt that cannot run then raises SpecbatchError when it is reached.
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
