"""Failures of other ranks, as threads: one error that names the rank, and Ctrl-C that leaves the ranks together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from targets import Targets
from thread_ranks import thread_group
from watched_calls import Watch

from specbatch import Completion, Engine, SamplingParams, SpecbatchError
from specbatch.engine.device import token_check
from specbatch.engine.device.step import DecodeStep
from specbatch.engine.ranks import rank_group, rank_link, ranks
from specbatch.engine.ranks.rank_group import RankGroup
from specbatch.engine.setup import builder

SHORT, LONG = (SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (6, 38))


@contextmanager
def fault_of_other_rank(owner: Any, name: str, fault: Callable[[], object], calls: int = 0) -> Iterator[None]:
    """After so many calls of a method by the other rank, `fault` comes first there."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if threading.current_thread() is not threading.main_thread():
            calls -= 1
            if calls < 0:
                fault()
        return method(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def raises() -> None:
    raise ZeroDivisionError("of a test")


def built(targets: Targets) -> Engine:
    return targets.engine("llama", "ngram", tensor_parallel=2)


@pytest.mark.parametrize("place", ["_load", "record_graphs"])
def test_a_rank_that_cannot_be_built_is_named(targets: Targets, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    thread_group(monkeypatch)
    message = "rank 1 failed: ZeroDivisionError: of a test; "
    with fault_of_other_rank(builder, place, raises), pytest.raises(SpecbatchError, match=message):
        built(targets)
    assert len(built(targets).generate([[3, 4]], SHORT)[0].token_ids) == 6


def test_a_closed_group_has_no_threads(targets: Targets, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends with the interpreter could be the last that holds the collectives, and abort the process."""
    thread_group(monkeypatch)
    built(targets)
    [group] = ranks.groups.values()
    others = set(threading.enumerate())

    def slow(*_: object) -> threading.Thread:
        time.sleep(0.2)
        return threading.current_thread()

    watchers = watch(RankGroup, "_ending", before=slow)
    group.close()
    assert len(watchers) == 1
    assert watchers[0] in others
    assert not watchers[0].is_alive()


def test_what_has_finished_before_a_rank_fails_is_kept(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    thread_group(monkeypatch)
    engine, kept = built(targets), list[Completion]()
    fault = fault_of_other_rank(DecodeStep, "__call__", raises, calls=9)
    with fault, pytest.raises(SpecbatchError, match="rank 1 failed: ZeroDivisionError"):
        engine.generate([[3, 4], [5, 6]], [SHORT, LONG], on_completion=kept.append)
    assert [len(item.token_ids) for item in kept] == [6]
    for work in (lambda: engine.generate([[3]], SHORT), lambda: engine.score([([3], [4])])):
        with pytest.raises(SpecbatchError, match="rank 1 failed: ZeroDivisionError"):
            work()


@pytest.mark.slow  # waits until it counts as silent
def test_a_rank_that_falls_silent_is_named(
    targets: Targets, watch: Watch, stopped_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_group(monkeypatch)
    engine, stuck = built(targets), threading.Event()
    monkeypatch.setattr(rank_group, "BEAT_S", 0.1)
    stopped_after(20)
    watch(rank_link.Link, "_send_beat", before=lambda link: stuck.wait())
    start, fault = time.monotonic(), fault_of_other_rank(DecodeStep, "__call__", stuck.wait, calls=9)
    with fault, pytest.raises(SpecbatchError, match="rank 1 has not answered for 2 s, as if its process were stopped"):
        engine.generate([[3, 4]], LONG)
    assert time.monotonic() - start < 10
    stuck.set()


@pytest.mark.slow
def test_ctrl_c_between_launches_leaves_the_ranks_together(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    thread_group(monkeypatch)
    engine = built(targets)
    expected = engine.generate([[3, 4]], LONG)[0].token_ids
    for step in range(8):
        calls = 0

        def interrupt(last: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls == last + 1:  # while rank 0 is within the same launch, which waits for this rank
                os.kill(os.getpid(), signal.SIGINT)

        with fault_of_other_rank(DecodeStep, "verify", interrupt), pytest.raises(KeyboardInterrupt):
            engine.generate([[3, 4]], LONG)
        assert engine.generate([[3, 4]], LONG)[0].token_ids == expected


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("place", ["propose", "accept"])
def test_a_rank_with_other_tokens_is_named(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, place: str, is_long: bool
) -> None:
    """A long text is not finished before this is noticed."""
    thread_group(monkeypatch)
    monkeypatch.setattr(token_check, "EVERY", 8)
    engine, method, calls, kept = built(targets), getattr(DecodeStep, place), 0, list[Completion]()
    engine.generate([[3, 4]], SHORT)
    first = engine.iterations

    def changed(*args: Any) -> Any:
        nonlocal calls
        found = method(*args)
        if threading.current_thread() is not threading.main_thread():
            calls += 1
            if calls == 3:
                found.tokens[0, 0] += 1
                return found._replace(drafted=found.drafted.clamp(min=1)) if place == "propose" else found
        return found

    monkeypatch.setattr(DecodeStep, place, changed)
    message = f"rank 1 did not choose the tokens of rank 0 in decode step {first + 2}, "
    with pytest.raises(SpecbatchError, match=message):
        engine.generate([[3, 4]], LONG if is_long else SHORT, on_completion=kept.append)
    assert len(kept) == (not is_long)
