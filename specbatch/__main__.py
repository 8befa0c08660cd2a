"""`python -m specbatch`, and the console script: runs the command line, also if it is interrupted while it starts."""

import sys


def main() -> None:
    try:
        from specbatch.cli.app import main as run  # takes half a second
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
