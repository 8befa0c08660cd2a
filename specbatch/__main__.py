"""`python -m specbatch`, and the console script: runs the command line, also if it is interrupted while it starts."""

import gc
import sys

# Garbage is collected after so many new objects. Imports create a quarter of a million objects that stay: with Python's
# default of at most 2,000 they are walked again and again, and a start takes a quarter of a second longer.
_OBJECTS_PER_COLLECTION = 100_000


def main() -> None:
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        from specbatch.cli.app import main as run  # takes a tenth of a second
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
