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


def test_lines_of_a_static_batch():
    """Those of bench_one_batch 0.5.23, with its numbers of Nemotron-Nano-9B-v2 at batch 32, input 256, output 32."""
    made = swept("v2", 32, section="onebatch-32", input_len=256, output_len=32)
    made.config["load_format"] = "dummy"
    made.caps = made.caps | {"prefill_chunk": 8192}
    made.requests = []
    made.metrics |= {"max_ttft_s": 0.43751, "median_itl_s": 0.01206, "duration_s": 0.812}
    assert one_batch({"onebatch-32": [made]}) == (
        "### As bench_one_batch prints it (random weights)\n\n```\nv2\n"
        "Batch size: 32, input: 256, output: 32\n"
        "Prefill. latency: 0.43751 s, throughput:  18724.14 token/s\n"
        "Decode.  median latency: 0.01206 s, median throughput:   2653.40 token/s\n"
        "Total. latency:  0.812 s, throughput:  11349.75 token/s\n"
        "```\n"
    )
    made.caps["prefill_chunk"] = 4000
    assert "output: 32, 3 or more passes of at most 4000 tokens\nPrefill." in one_batch({"onebatch-32": [made]})
    made.metrics["median_itl_s"] = None  # answers of one token
    assert "Decode" not in (text := one_batch({"onebatch-32": [made]}))
    assert "Prefill." in text
    made.metrics["max_ttft_s"] = None
    assert one_batch({"onebatch-32": [made]}) == ""
