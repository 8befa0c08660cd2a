"""Token ids of a job's prompts in a temporary file: each prompt is encoded once, and memory stays flat."""

from __future__ import annotations

from array import array
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

_MISSING = -1
_SIZE = array("i").itemsize


class TokensOnDisk:
    """Token ids by index of the row. Memory keeps their offsets.

    It only saves time: if the file cannot be written, for example because the disk is full, no tokens are kept.
    """

    def __init__(self, folder: Path) -> None:
        """folder: of the file, which has no name and disappears with the process. Not a folder for temporary files,
        which may be in memory."""
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._offsets = array("q")
        self._end = 0
        self._at_end = True
        self._is_usable = True

    def __contains__(self, index: int) -> bool:
        return index < len(self._offsets) and self._offsets[index] != _MISSING

    def get(self, index: int) -> list[int] | None:
        """The token ids of a row, if they are kept."""
        if index not in self or self._file is None:
            return None
        try:
            self._file.seek(self._offsets[index])  # which writes what was put before
            self._at_end = False
            count = int.from_bytes(self._file.read(_SIZE), "little")
            return array("i", self._file.read(count * _SIZE)).tolist()
        except OSError:
            self._drop()
            return None

    def put(self, index: int, tokens: list[int]) -> None:
        """Keep the token ids of a row, each of them below 2^31."""
        if not self._is_usable:
            return
        content = len(tokens).to_bytes(_SIZE, "little") + array("i", tokens).tobytes()
        try:
            if self._file is None:
                self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115
            if not self._at_end:  # without need it would write the buffer
                self._file.seek(self._end)
                self._at_end = True
            self._file.write(content)
        except OSError:
            self._drop()
            return
        if index >= len(self._offsets):
            self._offsets.extend([_MISSING] * (index + 1 - len(self._offsets)))
        self._offsets[index] = self._end
        self._end += len(content)

    def _drop(self) -> None:
        """Give the space back, and keep nothing from now on."""
        file, self._file, self._is_usable = self._file, None, False
        self._offsets = array("q")
        if file is not None:
            with suppress(OSError):  # what was not written yet cannot be written
                file.close()
