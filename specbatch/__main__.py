"""`python -m specbatch`: the same as the console script."""

from specbatch.cli.app import main

if __name__ == "__main__":
    main()
