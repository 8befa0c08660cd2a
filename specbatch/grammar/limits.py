"""Limits of grammars: CPU time to compile or refuse one, and memory for the results and refusals that are kept."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from hashlib import blake2b
from threading import Lock

READING_S = 1.8  # CPU seconds to translate a schema and to parse an expression
COMPILING_S = 2.8  # CPU seconds to compile it; with the first use of this code, 5 in all
MOST_STATES = 16_000  # of an automaton over bytes
KEPT = 1 << 24  # characters, of results and of refusals
ENTRY = 200  # characters that an entry takes beside its text
_LITTLE = 2_000  # steps between two looks at the clock: about 1 ms


class RegexError(ValueError):
    """Why an expression cannot be compiled."""


class TooManyStatesError(RegexError):
    """The automaton of an expression is too large."""

    def __init__(self) -> None:
        super().__init__(f"its automaton has more than {MOST_STATES} states: repeat less, or match less in between")


class TooMuchWorkError(RegexError):
    """A grammar takes more steps than it may."""


class _Clock:
    """CPU time of this thread: a busy machine and other threads do not count."""

    def __init__(self, seconds: float, steps: float) -> None:
        self.seconds = seconds
        self._end = time.thread_time() + seconds
        self._steps = 0
        self._left = steps

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooMuchWorkError("it takes too much work")
        self._steps += steps
        if self._steps >= _LITTLE:
            self._steps = 0
            if time.thread_time() > self._end:
                raise RegexError(
                    f"it takes more than {self.seconds:g} seconds of CPU time; use a smaller one, repeat less, or use "
                    "fewer optional parts"
                )


_clock: ContextVar[_Clock | None] = ContextVar("clock", default=None)


@contextmanager
def limited(seconds: float, steps: float = math.inf) -> Iterator[None]:
    """A grammar whose work within takes more CPU time, or more steps (see `spend`), is refused with a RegexError.
    Within another limit, that one holds."""
    if _clock.get() is not None:
        yield
        return
    token = _clock.set(_Clock(seconds, steps))
    try:
        yield
    finally:
        _clock.reset(token)


def spend(steps: int = 1) -> None:
    """Count steps of about half a microsecond. Every loop whose length a grammar decides calls it."""
    if (clock := _clock.get()) is not None:
        clock.spend(steps)


class KeptTexts:
    """Texts by other texts, the last ones of at most 16 million characters. Only digests of the keys are kept."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, key: str) -> str | None:
        with self._lock:
            if (digest := _digest(key)) in self._texts:
                self._texts.move_to_end(digest)
            return self._texts.get(digest)

    def put(self, key: str, text: str) -> None:
        with self._lock:
            self._size -= _size(self._texts.pop(_digest(key), None))
            self._texts[_digest(key)] = text
            self._size += _size(text)
            while self._size > KEPT and len(self._texts) > 1:
                self._size -= _size(self._texts.popitem(last=False)[1])


def remembered(error: type[RegexError]) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Keeps the results and the refusals of a function of texts: a refusal takes as long to find. error: the class of
    refusals."""

    def of(function: Callable[..., str]) -> Callable[..., str]:
        results, refusals = KeptTexts(), KeptTexts()

        @wraps(function)
        def call(*texts: str) -> str:
            text = "\0".join(texts)
            if (result := results.get(text)) is not None:
                return result
            if (reason := refusals.get(text)) is None:
                try:
                    result = function(*texts)
                except RegexError as found:
                    reason = str(found)
                    refusals.put(text, reason)
                else:
                    results.put(text, result)
                    return result
            raise error(reason)

        return call

    return of


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _size(text: str | None) -> int:
    return 0 if text is None else len(text) + ENTRY
