"""Calls of a worker that the other ranks of a tensor-parallel engine make, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from specbatch.engine.device.deferred_interrupts import DeferredInterrupts
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.dispatch import use_deterministic
from specbatch.progress.bars import Report

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound="Worker")
ANSWER = "answer"  # what the other ranks are sent within a call, see `AskedHost`
CALLS: list[str] = []  # the methods that launch work. Call them in `torch.inference_mode()`


class OtherRanks(Protocol):
    """The other ranks of a tensor-parallel engine, which make the same calls as this one."""

    def build(self) -> Communicator:
        """Start them, if they are not running, and have them build their part of the engine. Returns this rank's end of
        the group."""
        ...

    def send(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Have them make a call. Raises SpecbatchError if one of them has failed."""

    def check(self) -> None:
        """Raises SpecbatchError if one of them has failed."""

    def with_theirs(self, report: Report) -> Report:
        """A report for the progress of this rank in building an engine, which adds that of the others."""
        ...

    def wait_until_built(self) -> None:
        """Wait until they have built their parts of the engine. Raises SpecbatchError if one of them has failed."""

    def report(self, number: int, history: list[int]) -> None:
        """Compare the digests of this rank with theirs, see `TokenCheck`."""

    def wait_until_compared(self) -> None:
        """Wait until all digests that were reported are found equal. Raises SpecbatchError if they are not."""

    def fail(self, error: BaseException) -> None:
        """A call has raised an error here, and the ranks are at different places in their work. Raises SpecbatchError
        if this is a consequence of what happened to another rank."""


class Worker(Protocol):
    """Of a rank. others: None where it leads no others; deterministic: see `use_deterministic`."""

    others: OtherRanks | None
    deterministic: bool


def launches(method: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], T]:
    """A method that launches work. The other ranks, if any, are sent the same call first. Ctrl-C waits until both have
    happened, as ranks with different work would wait for each other forever."""
    CALLS.append(method.__name__)

    @wraps(method)
    def call(self: W, *args: P.args, **kwargs: P.kwargs) -> T:
        others = self.others
        if others is None:
            with use_deterministic(self.deterministic):
                return method(self, *args, **kwargs)
        assert not kwargs, "calls are sent by position"
        with DeferredInterrupts():
            try:
                others.send(method.__name__, args)
                return method(self, *args, **kwargs)
            except BaseException as error:
                others.fail(error)
                raise

    return cast("Callable[Concatenate[W, P], T]", call)
