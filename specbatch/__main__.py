"""`python -m specbatch`, and the console script: runs the command line, also if it is interrupted while it starts."""

import gc
import sys

# New objects per collection. Imports make a quarter of a million objects that stay: with the usual 700, walking them
# again and again takes a quarter of a second of a start.
_OBJECTS_PER_COLLECTION = 100_000


def main() -> None:
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        from specbatch.cli.app import main as run  # takes a tenth of a second
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    try:
        run()
    finally:
        gc.freeze()  # else the interpreter walks all of them several times as it ends: half a second with torch


if __name__ == "__main__":
    main()
