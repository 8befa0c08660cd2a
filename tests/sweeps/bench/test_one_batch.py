"""Lines of bench_one_batch from the sections of a bench."""

from __future__ import annotations

from swept import swept

from specbatch.sweeps.bench.one_batch import one_batch


def test_lines_of_each_configuration():
    records = {}
    for section, concurrency, length, found in (
        ("decode", 8, 512, {"step_s": 0.1, "decode_throughput": 80.0}),
        ("ttft-1024", 1, 1024, {"median_ttft_s": 0.5}),
        ("closed", 8, 512, {"step_s": 9.0}),
    ):
        for name in ("baseline", "v2"):
            made = swept(name, concurrency, section=section, input_len=length)
            made.requests = []
            made.metrics |= found
            records.setdefault(section, []).append(made)
    records["decode"][1].metrics["step_s"] = None  # too few steps
    assert one_batch(records) == (
        "### As bench_one_batch prints it\n\n```\n"
        "baseline\n"
        "Decode.  batch size: 8, input: 512, mean latency: 0.10000 s, throughput:     80.00 token/s\n"
        "Prefill. batch size: 1, input: 1024, latency: 0.50000 s, throughput:   2048.00 token/s\n"
        "\nv2\n"
        "Prefill. batch size: 1, input: 1024, latency: 0.50000 s, throughput:   2048.00 token/s\n"
        "```\n"
    )
    assert one_batch({"closed": records["closed"]}) == ""
