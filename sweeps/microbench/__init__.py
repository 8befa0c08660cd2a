"""Benchmarks of single operations: `python -m specbatch.sweeps.microbench OPERATION`."""
