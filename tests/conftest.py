"""Environment, options and collection of all tests; `tests/kit/shared_fixtures.py` has their fixtures."""

from __future__ import annotations

import os

# One thread per process, child processes included, unless the user chose otherwise: toy models gain nothing from
# threads, and the pools of several pytest workers wait for each other. BLAS libraries read these when they are loaded.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
os.environ["MKL_NUM_THREADS"] = os.environ.get("MKL_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]
os.environ["OPENBLAS_NUM_THREADS"] = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]

import sys

# Container images often set this. Every worker, and every process that a test starts, would then compile all modules
# and tests again, in each run: eight seconds of a worker's.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

import atexit
import gc
import signal
from collections.abc import Generator
from random import Random

import pytest

MOST = 250  # cases of a test with `--sample`: all have fewer but those that combine every drafter with every target

# A shell has what it runs in the background ignore interruptions, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands tests to workers needs no fixtures: they import torch, which takes two seconds."""
    if config.getoption("dist", "no") == "no" or config.option.collectonly:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz", type=int, metavar="N", help="rounds of each fuzz test, in place of a few")
    group.addoption("--fuzz-seed", type=int, metavar="SEED", help="only the round with this seed")
    group = parser.getgroup("slow tests")
    group.addoption("--sample", metavar="SEED", help=f"at most {MOST} cases of each test, drawn with this seed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--sample`, of the cases that other options leave."""
    seed = config.getoption("sample")
    if seed is None:
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {
        item for test, cases in tests.items() for item in Random(f"{seed} {test}").sample(cases, min(len(cases), MOST))
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays: the garbage collector need not look through it, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_sessionfinish() -> None:
    """Nor at the end, when pytest has it look for exceptions that were not raised: a second of each worker's."""
    gc.freeze()


atexit.register(gc.unfreeze)  # else bindings report at the end that their objects are still there
