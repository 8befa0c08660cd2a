"""The requests of an open stream, from submission to their last event: tokens as events, completions, aborts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from specbatch.core.completion import Completion
from specbatch.core.request import Request
from specbatch.engine.requests.prompt_reader import PromptReader
from specbatch.engine.requests.submissions import Submission
from specbatch.engine.schedule.scheduler import Scheduler
from specbatch.grammar.host_matcher import HostGrammar
from specbatch.grammar.token_automaton import TokenAutomaton
from specbatch.text.thinking import reasoning_tokens
from specbatch.text.tokenizer import Tokenizer

Detail = Literal["completions", "tokens", "text"]  # what a stream yields: completions only, tokens, tokens with text


# Completions that are built between two steps, if so many requests have ended. With its text one takes some tenths of a
# millisecond. Those above are built while the host waits for the device, unless too many are left: more than can end in
# one step, as where more end in every step, or `_MOST_LEFT`.
_AT_ONCE, _MOST_LEFT = 8, 1_024


@dataclass(slots=True)
class StreamEvent:
    """New tokens of one sample of the prompt at `index`.

    completion  on the sample's last event, else None
    text        the text since the sample's last event. It never ends in the middle of a character, and text that may
                be the beginning of a stop string comes with a later event. All together are `completion.text`
    request_id  the caller's name of the prompt, if given
    """

    index: int
    token_ids: list[int]
    completion: Completion | None
    text: str = ""
    sample: int = 0
    request_id: str | None = None


class _Ended(NamedTuple):
    """A request whose completion is not built yet, its last new tokens, and when it ended."""

    request: Request
    tokens: list[int]
    now: float


class OpenRequests:
    """Unfinished requests, and the events that the stream has not yielded yet.

    Where many requests end in one step, most of their completions are built later: the host would be late with the next
    step, and the device would run dry.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        prompts: PromptReader,
        on_finish: Callable[[Completion, float], None],
    ) -> None:
        """on_finish: called with each completion and the time."""
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._reasoning = reasoning_tokens(tokenizer)
        self._on_finish = on_finish
        self._active: dict[tuple[int, int], Request] = {}  # by prompt and sample
        self._aborts: deque[int | str] = deque()  # asked for, perhaps by another thread, and not handled yet
        self._aborted: set[int | str] = set()  # in this stream
        self._events: list[StreamEvent] = []
        self._ended: deque[_Ended] = deque()
        self._detail: Detail = "text"

    def __len__(self) -> int:
        return len(self._active)

    @property
    def pending(self) -> bool:
        """Whether requests are unfinished, or events are left."""
        return bool(self._active) or self.has_events

    @property
    def has_events(self) -> bool:
        return bool(self._events or self._ended)

    def begin(self, detail: Detail) -> None:
        """A stream begins."""
        self._detail = detail
        self._aborts.clear()
        self._aborted.clear()

    def submit(self, item: Submission, arrived: float) -> None:
        grammar = self._prompts.grammar(item.params)
        request = Request(
            item.index,
            list(item.prompt.token_ids),
            item.params,
            end_tokens=self._prompts.end_tokens,
            decode=partial(self._tokenizer.decode, skip_special_tokens=item.params.skip_special_tokens),
            byte_tokens=self._tokenizer.byte_tokens,
            submitted=arrived,
            embeddings=item.prompt.embeddings,
            sample=item.sample,
            request_id=item.request_id,
            streams_text=self._detail == "text",
            banned=self._prompts.banned(item.params.bad_words),
            automaton=grammar if isinstance(grammar, TokenAutomaton) else None,
            matcher=grammar.matcher() if isinstance(grammar, HostGrammar) else None,
            reasoning=self._reasoning,
        )
        self._active[item.index, item.sample] = request
        self._scheduler.add(request)
        if self._aborted and not self._aborted.isdisjoint((item.index, item.request_id)):
            self._abort(request)

    def add_tokens(self, request: Request, tokens: list[int]) -> None:
        """A request has new tokens, or has finished."""
        if request.finish_reason is not None:
            self._finish(request, tokens)
        elif self._detail != "completions":
            self._add_event(request, tokens, None)

    def abort(self, name: int | str) -> None:
        """Note that all samples of a prompt, by index or request id, are to be aborted. Any thread may call this."""
        self._aborts.append(name)

    def handle_aborts(self) -> None:
        while self._aborts:
            name = self._aborts.popleft()
            self._aborted.add(name)  # it may not be submitted yet
            for request in list(self._active.values()):
                if name in (request.index, request.request_id):
                    self._abort(request)

    def take_events(self, *, is_last: bool = False) -> list[StreamEvent]:
        """The events since the last call. While requests are unfinished, and unless it `is_last`, those of some that
        have ended may come with a later call."""
        count = len(self._ended)
        if self._active and not is_last:
            count = max(min(count, _AT_ONCE), count - min(_MOST_LEFT, self._scheduler.max_running))
        for _ in range(count):
            self.build_one()
        events, self._events = self._events, []
        return events

    def build_one(self) -> bool:
        """Build the completion of the first request that has ended. False if there is none."""
        if not self._ended:
            return False
        request, tokens, now = self._ended.popleft()
        completion = request.completion(now)
        self._on_finish(completion, now)
        self._add_event(request, tokens, completion)
        return True

    def build(self) -> None:
        """Build the completions of all requests that have ended."""
        while self.build_one():
            pass

    def drop(self) -> None:
        """End all requests without events. What had ended before counts in the record."""
        self.build()
        for request in list(self._active.values()):
            self._end(request)
        self._events.clear()
        self._ended.clear()

    def _abort(self, request: Request) -> None:
        self._end(request)
        self._finish(request, [])

    def _end(self, request: Request) -> None:
        request.finish_reason = "abort"
        self._scheduler.finish(request)
        self._active.pop((request.index, request.sample), None)

    def _finish(self, request: Request, tokens: list[int]) -> None:
        self._active.pop((request.index, request.sample), None)
        self._ended.append(_Ended(request, tokens, time.perf_counter()))

    def _add_event(self, request: Request, tokens: list[int], completion: Completion | None) -> None:
        text = request.new_text(completion) if self._detail == "text" else ""
        event = StreamEvent(request.index, tokens, completion, text, request.sample, request.request_id)
        self._events.append(event)
