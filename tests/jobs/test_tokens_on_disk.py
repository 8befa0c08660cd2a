"""Token ids of prompts in a temporary file."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from specbatch.jobs import tokens_on_disk
from specbatch.jobs.tokens_on_disk import TokensOnDisk


def test_tokens_are_read_as_they_were_put_in_any_order(tmp_path: Path) -> None:
    chance, kept = random.Random(0), TokensOnDisk(tmp_path)
    expected: dict[int, list[int]] = {}
    for _ in range(2_000):
        index = chance.randrange(300)
        if chance.random() < 0.5:
            expected[index] = [chance.randrange(2**31) for _ in range(chance.randrange(40))]
            kept.put(index, expected[index])
        assert kept.get(index) == expected.get(index)
        assert (index in kept) == (index in expected)
    assert not list(tmp_path.iterdir())  # the file has no name


@pytest.mark.parametrize("room", [-1, 0, 5_000])
def test_without_space_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    class Full:
        """A file on a disk with this much room; -1: not even a file fits."""

        def __init__(self, **_: Any) -> None:
            self.fail_above(0)

        def fail_above(self, size: int) -> None:
            if size > room:
                raise OSError(errno.ENOSPC, "No space left on device")

        def write(self, data: bytes) -> None:
            self.size = getattr(self, "size", 0) + len(data)
            self.fail_above(self.size)

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokens_on_disk, "TemporaryFile", Full)
    kept = TokensOnDisk(tmp_path)
    for index in range(100):
        kept.put(index, list(range(50)))
    assert kept.get(0) is None
    assert 0 not in kept
