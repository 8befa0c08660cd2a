"""Registry entries of the numbers that `bench` adds: a step against memory bandwidth and the time of its GEMMs."""

from __future__ import annotations

from specbatch.records.metric import Metric

OF_BENCH = (
    Metric(
        "step_bytes",
        "GB per step",
        "GB per step",
        "`bench`: bytes that a full-batch step must move: the weights that it uses (of a mixture, the experts that are "
        "hit on average if each token chooses at random), the KV cache at the mean context, and the states of "
        "recurrent layers, read and written once. Not computed for a step that runs a draft model.",
        "weights + requests x (mean context x bytes per token + states)",
        decimals=2,
        is_time=False,
    ),
    Metric(
        "step_bandwidth",
        "GB/s",
        "GB/s",
        "`bench`: bandwidth that the step reaches.",
        "bytes per step / full-batch step",
        better="higher",
        decimals=0,
    ),
    Metric(
        "sheet_share",
        "share of data-sheet bandwidth",
        "%",
        "`bench`: share of the data-sheet bandwidth that the step reaches.",
        "bandwidth of the step / bandwidth of the data sheet",
        better="higher",
        decimals=0,
    ),
    Metric(
        "read_share",
        "share of measured read bandwidth",
        "%",
        "`bench`: share of the read bandwidth measured in the same run that the step reaches.",
        "bandwidth of the step / read bandwidth",
        better="higher",
        decimals=0,
    ),
    Metric(
        "floor_s",
        "floor",
        "ms",
        "`bench`: time in which the device could read the bytes of a step.",
        "bytes per step / read bandwidth",
        decimals=2,
    ),
    Metric(
        "gemm_s",
        "GEMMs alone",
        "ms",
        "`bench`: time of the target's GEMMs alone, on weights of the same shapes. Measured for dense attention models "
        "in BF16, FP16 and FP32.",
        "measured once for each number of rows with torch.nn.functional.linear",
        decimals=2,
    ),
    Metric(
        "times_gemms",
        "times GEMMs",
        "",
        "`bench`: the full-batch step, or the TTFT of a single request, over its GEMMs alone.",
        "full-batch step or median TTFT / GEMMs alone",
        better="lower",
        decimals=2,
    ),
    Metric(
        "read_bytes_s",
        "read bandwidth",
        "TB/s",
        "`bench`: device memory bandwidth of a plain read.",
        "bytes / second",
        better="higher",
        decimals=2,
    ),
    Metric(
        "gemm_flop_s",
        "bf16 GEMM",
        "TFLOP/s",
        "`bench`: speed of a large BF16 GEMM.",
        "floating-point operations / second",
        better="higher",
        decimals=0,
    ),
)
