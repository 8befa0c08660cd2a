"""What `python -m specbatch` does around a command."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from specbatch.__main__ import main


@pytest.fixture
def collector() -> Iterator[None]:
    """The garbage collector, as it was after the test."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_objects_of_imports_are_not_walked_at_the_start_nor_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = []

    def fail() -> None:
        thresholds.append(gc.get_threshold()[0])
        raise SystemExit(3)

    monkeypatch.setattr("specbatch.cli.app.main", fail)
    frozen = gc.get_freeze_count()
    with pytest.raises(SystemExit, match="3"):
        main()
    assert thresholds == [100_000]
    assert gc.get_freeze_count() > frozen
