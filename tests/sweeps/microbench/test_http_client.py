"""The benchmark of the HTTP client: a row for each concurrency."""

from __future__ import annotations

import pytest

from specbatch.sweeps.microbench.http_client import tables


@pytest.mark.slow
def test_cpu_time_per_chunk():
    for table in tables(concurrency="2", chunks=5, repeats=1):
        (row,) = table.measured()
    assert row["requests in flight"] == 2
    assert float(str(row["client CPU per chunk (us)"]).split()[0]) > 0
    assert float(str(row["chunks/s on a full core"])) > 0
