"""The `specbatch` command line."""
