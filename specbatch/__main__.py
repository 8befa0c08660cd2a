"""`python -m specbatch`, and the console script: runs the command line, also if it is interrupted while it starts."""

import gc
import io
import os
import sys
from contextlib import suppress

# Garbage is collected after so many new objects. Imports create a quarter of a million objects that stay: with Python's
# default of at most 2,000 they are walked again and again, and a start takes a quarter of a second longer.
_OBJECTS_PER_COLLECTION = 100_000


class _Messages(io.TextIOWrapper):
    """Standard error that drops what cannot be written: a closed pipe or a full disk there does not end a job."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def _open_streams() -> None:
    """Open the standard streams that the caller has closed as the null device. Otherwise the next files that are opened
    would have their numbers, and what is printed would be written into them."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        null = os.open(os.devnull, os.O_RDWR)
        while null <= 2:  # the lowest free number
            null = os.dup(null)
        os.close(null)
        sys.stdin, sys.stdout = sys.stdin or os.fdopen(0, "r"), sys.stdout or os.fdopen(1, "w")
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"
    sys.stderr = _Messages(open(2, "wb", closefd=False), encoding, "backslashreplace", line_buffering=True)  # noqa: SIM115


def main() -> None:
    _open_streams()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        from specbatch.cli.app import main as run  # takes a tenth of a second
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
