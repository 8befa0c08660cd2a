"""A command does not walk the objects of its imports over and over, neither as it starts nor as it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from specbatch.__main__ import main

CODE = """
import gc, sys
from specbatch.cli.options import EngineOptions
EngineOptions(device="cpu").config()
assert "torch" in sys.modules and "triton" not in sys.modules
first = gc.get_freeze_count()
EngineOptions(device="cpu").config()
print(first, gc.get_freeze_count())
try:
    import specbatch.runtime.parallel_compilation, specbatch.kernels.gemm.quantized.few_rows_triton
except ModuleNotFoundError:  # there is no Triton
    pass
"""


@pytest.fixture
def collector() -> Iterator[None]:
    """The garbage collector, as it was after the test."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector")
def test_a_start_collects_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = []
    monkeypatch.setattr("specbatch.cli.app.main", lambda: thresholds.append(gc.get_threshold()[0]))
    main()
    assert thresholds == [100_000]


def test_imports_are_kept_once_and_without_complaints_of_triton() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert first > 100_000
    assert second == first
    assert done.stderr == "", "Triton reports what is not freed"
