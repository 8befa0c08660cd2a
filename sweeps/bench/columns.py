"""Columns and sections of the table of `specbatch bench`, and the notes that describe its methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specbatch.config import Graphs
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord

SECTIONS = ("machine", "decode", "closed", "ttft", "verify")
BASELINE = "baseline"  # of a bench that drafts: no speculation, schedule v2, prompts as fast as the device can
MACHINE_NEEDS = "needs a CUDA device"
LEAST_STEPS = 20  # iterations with all requests, whose mean is the step time
Row = dict[str, Any]


@dataclass(frozen=True)
class Bounds:
    """Bytes per second: the data sheet's, and the read bandwidth measured in this run. None: not known."""

    sheet: float | None
    read: float | None


@dataclass(frozen=True)
class Column:
    """A column of the CSV. `value` raises KeyError or TypeError where nothing was measured."""

    title: str
    decimals: int
    value: Callable[..., Any]


@dataclass(frozen=True)
class Section:
    """How Markdown shows a section.

    size            what its sizes are: batch, concurrency or prompt tokens
    primary         the column that the section is about, shown with its spread
    base            configuration that the ratio is over
    configurations  which configurations it has, in words
    peer_columns    columns for which other engines' figures are shown
    ratio           what the ratio compares, if not the primary column
    """

    title: str
    size: str
    primary: str
    base: str
    columns: tuple[str, ...]
    configurations: str
    peer_columns: tuple[str, ...]
    ratio: Callable[[RunRecord], Any] | None = None


def unmeasured(record: RunRecord) -> str | None:
    """Why a point that did not fail has no primary number."""
    work, metrics = record.workload, record.metrics
    if "error" in work:
        return None
    if work["section"] == "machine":
        return MACHINE_NEEDS if metrics["read_bytes_s"] is None else None
    if "full_batch_steps" in work:
        steps, most = work["full_batch_steps"], work["concurrency"]
        few = f"{steps} steps ran all {most} requests and {LEAST_STEPS} are needed"
        works = "use more --new-tokens or a larger --prefill-chunk"
        return f"NOT MEASURED: {few}; {works}" if steps < LEAST_STEPS else None
    if work.get("iterations") != work.get("steps"):
        return f"NOT IN STEP: {work['iterations']} iterations for {work['steps']} tokens"
    if "step_s" in metrics and (metrics["step_s"] or 0.0) <= 0:
        short, long = work["new_tokens"]
        return f"NOT MEASURED: {long} new tokens took no longer than {short}; use --new-tokens that are further apart"
    return None


def _metric(key: str, decimals: int | None = None) -> dict[str, Column]:
    metric = METRICS[key]
    shown = metric.decimals if decimals is None else decimals
    return {metric.column or key: Column(metric.heading, shown, metric.read)}


def _graphs(name: str, *kinds: str) -> Callable[[RunRecord], Any]:
    """A counter of graphs, summed over the kinds that were requested."""

    def value(record: RunRecord) -> int | None:
        found = [graph[name] for kind in kinds for graph in record.graphs(kind).values()]
        return sum(sum(one.values()) if isinstance(one, dict) else one for one in found) if found else None

    return value


def _coverage(record: RunRecord) -> Any:
    return 100 * record.metrics["graph_coverage"] if Graphs(**record.config["graphs"]).any else None  # type: ignore[operator]


def _accept_length(record: RunRecord) -> Any:
    return record.metrics["accept_length"] if record.drafts else None


def _step_ms(record: RunRecord) -> Any:
    return None if unmeasured(record) else 1e3 * record.metrics["step_s"]  # type: ignore[operator]


def step_tokens(record: RunRecord) -> Any:
    """Tokens that a step gives a request: the measured accept length, also where one was simulated."""
    return record.metrics["accept_length"] if record.drafts else 1.0


def _speed(record: RunRecord) -> Any:
    """Proportional to the tokens per second of a decode step."""
    return step_tokens(record) / _step_ms(record)


# Values of one record; the table shows the median over repeats.
MEASURED = {
    **_metric("read_bytes_s"),
    **_metric("gemm_flop_s"),
    "step_ms": Column("ms per step", 2, _step_ms),
    "step_gb": Column("GB per step", 2, lambda r: r.workload["step_bytes"] / 1e9),
    "full_batch_steps": Column("steps of all", 0, lambda r: r.workload["full_batch_steps"]),
    **_metric("products_s"),
    **_metric("output_throughput", 0),
    **_metric("mean_tpot_s"),
    **_metric("mean_ttft_s"),
    **_metric("median_ttft_s", 2),
    "accept_length": Column("accept length", 3, _accept_length),
    "step_tokens": Column("tokens per step", 3, step_tokens),
    "decode_replays": Column("decode replays", 0, _graphs("replays", "decode")),
    "prefill_replays": Column("prefill replays", 0, _graphs("replays", "prefill")),
    "target_prefill_replays": Column("target prefill replays", 0, _graphs("replays", "target_prefill")),
    "draft_prefill_replays": Column("draft prefill replays", 0, _graphs("replays", "draft_prefill")),
    "fallbacks": Column("fallbacks", 0, _graphs("fallbacks", "decode", "prefill")),
    "padded": Column("padded", 0, _graphs("padded", "decode", "prefill")),
    "graph_coverage_percent": Column(METRICS["graph_coverage"].heading, 0, _coverage),
    **_metric("launch_lead_s"),
    **_metric("late_launch_share"),
    **_metric("host_waits_per_step"),
    "host_ms_per_step": Column(
        "host ms per step", 2, lambda r: 1e3 * r.counters["iteration_s"] / r.counters["iterations"]
    ),
    **_metric("device_idle_share"),
}
# Values computed from a row of the above and the bounds of the run, so that the numbers of a row agree.
DERIVED = {
    "decode_tok_s": Column("tok/s", 0, lambda row, _: 1e3 * row["size"] * row["step_tokens"] / row["step_ms"]),
    "step_gb_s": Column("GB/s", 0, lambda row, _: 1e3 * row["step_gb"] / row["step_ms"]),
    "sheet_percent": Column("% of data sheet", 0, lambda row, bounds: 1e11 * row["step_gb_s"] / bounds.sheet),
    "read_percent": Column("% of read", 0, lambda row, bounds: 1e11 * row["step_gb_s"] / bounds.read),
    "floor_ms": Column("floor ms", 2, lambda row, bounds: 1e12 * row["step_gb"] / bounds.read),
    "over_products": Column("times GEMMs", 2, lambda row, _: row[SHOWN[row["section"]].primary] / row["products_ms"]),
}
COLUMNS = MEASURED | DERIVED
_WAITS = ("launch_lead_ms", "late_launch_percent", "host_waits_per_step", "host_ms_per_step", "device_idle_percent")
_GRAPHS = ("fallbacks", "padded", "graph_coverage_percent")
_COUNTERS = ("accept_length", "decode_replays", "prefill_replays", *_GRAPHS, *_WAITS)
_BY_KIND = ("accept_length", "decode_replays", "target_prefill_replays", "draft_prefill_replays", *_GRAPHS, *_WAITS)
_PRODUCTS = ("products_ms", "over_products")
_STEP = (
    *("decode_tok_s", "step_gb", "step_gb_s", "sheet_percent", "read_percent", "floor_ms"),
    *_PRODUCTS,
    *_COUNTERS,
)
_ASKED = "from --configs; default: all that the device supports"
SHOWN: dict[str, Section] = {
    "decode": Section(
        "Decode step", "batch", "step_ms", "v1", _STEP,
        f"{_ASKED}; v2+piecewise decodes like v2, so it is left out next to v1 or v2", ("step_ms",),
    ),
    "closed": Section(
        "Closed loop", "concurrency", "output_tok_s", "v1", ("mean_tpot_ms", "mean_ttft_ms", *_COUNTERS), _ASKED,
        ("output_tok_s",),
    ),
    "ttft": Section(
        "First token of one request", "prompt tokens", "median_ttft_ms", "v2", (*_PRODUCTS, *_COUNTERS), _ASKED,
        ("median_ttft_ms",),
    ),
    "verify": Section(
        "Verify step", "batch", "step_ms", "v2", _STEP, "always v2, with 1 and with 16 rows", ("step_ms",)
    ),
}  # fmt: skip
_DRAFTING = f"{_ASKED}; baseline: no speculation, schedule v2"
# The same for a bench that compares drafting with a baseline.
DRAFTING: dict[str, Section] = {
    "decode": replace(
        SHOWN["decode"], title="Iteration at full batch", base=BASELINE, configurations=_DRAFTING, ratio=_speed,
        columns=("decode_tok_s", "full_batch_steps", *_BY_KIND), peer_columns=("step_ms", "decode_tok_s"),
    ),
    "closed": replace(
        SHOWN["closed"], base=BASELINE, configurations=_DRAFTING,
        columns=("mean_tpot_ms", "mean_ttft_ms", *_BY_KIND),
    ),
    "ttft": replace(
        SHOWN["ttft"], base=BASELINE, configurations=_DRAFTING, columns=(*_PRODUCTS, *_BY_KIND[1:])
    ),
}  # fmt: skip
# Notes on the method of each section that was run.
METHODS = {
    "steps": "Steps: {input_len} prompt tokens, {tokens} new ones; the difference of the two runs. Bytes: the weights "
    "that a step uses (an embedding table that is not the head is not read) and KV at {mean_context:.0f} tokens. "
    "Counters are from the longer run.",
    "experts": "Bytes of a mixture of experts: of its {experts} experts a step reads those that its tokens are routed "
    "to, on average {experts} x (1 - (1 - {top_k} / {experts}) ^ tokens) if each token chose {top_k} at random; shared "
    "weights are read once.",
    "states": "States of recurrent layers are read once and written once a step, and so are the inputs of every row.",
    "full batch": "Steps: {input_len} prompt tokens, {output_len} new ones; the mean time of the iterations (draft, "
    "verify, accept, commit) that ran all requests, from one to the next. Requests accept independently and end one by "
    "one; iterations with fewer requests are excluded. tok/s: batch x accept length / step, which the ratio compares, "
    "too; the accept length is the measured one, also with a simulated accept length. Decode replays are of whole "
    "iterations.",
    "floor": "Floor: the bytes of a step at the read bandwidth measured here.",
    "products": "GEMMs alone: the target's GEMMs by torch's linear on weights of the same shapes, measured once.",
    "no products": "GEMMs alone: not measured, because {no_products}.",
    "closed": "Closed loop: {input_len} prompt tokens, {output_len} new ones, two prompts per request kept unfinished "
    "(3 in all at 1); output tokens over wall time, prefill included.",
    "ttft": "First token: each request alone on the engine, from its submission to its first token on the host.",
    "verify": "With a simulated accept length of 1 each verify emits one token, so that the batch stays together.",
}
PRIMARY = tuple(dict.fromkeys(section.primary for section in SHOWN.values()))


def shown(records: list[RunRecord]) -> dict[str, Section]:
    """Sections without drafts, or of a bench that drafts (the drafts of the verify section do not count)."""
    drafting = any(record.drafts for record in records if record.workload["section"] != "verify")
    return SHOWN | DRAFTING if drafting else SHOWN
