"""Made-up points of a sweep with a few numbers, and the text of their table."""

from __future__ import annotations

from dataclasses import asdict

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import summarize
from specbatch.sweeps.report.tables import markdown, table

CAPS = {"max_running": 4, "max_model_len": 64, "kv_pages": 32, "page_size": 16, "prefill_chunk": 64}
CPU = {"device": "cpu", "dtype": "float32"}


def record(configuration: str, repeat: int, speed: float | None, *, concurrency: int = 4, **work: object) -> RunRecord:
    metrics = dict.fromkeys(summarize([], 0.0)) | {"requests": 2, "output_throughput": speed, "drafted_tokens": 8}
    workload = {
        "dataset": "random", "input_len": 8, "output_len": 4, "ignore_eos": True, "seed": 0, "prompts": 2,
        "output_sha256": "same", "configuration": configuration, "repeat": repeat, "concurrency": concurrency,
        "place": ["baseline", "v1", "v2", configuration].index(configuration),
    }  # fmt: skip
    work = workload | work
    made = RunRecord({}, CAPS | CPU, metrics, {}, [], work, created="2030-01-01T00:00:00+00:00")
    schedule = configuration if configuration in ("v1", "v2") else "v1"
    speculation = Speculation() if configuration == "baseline" else Speculation("ngram", schedule)
    return configured(made, speculation)


def configured(made: RunRecord, speculation: Speculation) -> RunRecord:
    made.config = asdict(EngineConfig(speculation=speculation, graphs=Graphs()))
    return made


def simulated(made: RunRecord, mean: float) -> RunRecord:
    return configured(made, Speculation("ngram", "v1", draft_tokens=7, simulate_accept_length=mean))


def pair(speed: float = 20.0, **work: object) -> list[RunRecord]:
    """A baseline at 10 tok/s, and v1."""
    return [record("baseline", 1, 10.0), record("v1", 1, speed, **work)]


def text_of(records: list[RunRecord]) -> str:
    return markdown(records, table(records))


def full_batch(name: str, step_s: float | None, repeat: int = 1, *, steps: int = 50) -> RunRecord:
    """At a full batch; "v1" drafts and emits 2 tokens per verify, by steps of all sizes at half of the break-even."""
    made, accept = record(name, repeat, 1.0), 1.0 if name == "baseline" else 2.0
    made.metrics |= {"full_batch_steps": steps, "step_s": step_s, "accept_length": accept}
    made.metrics["decode_throughput"] = 4 * accept / step_s if step_s else None
    made.counters = {"steps_by_rows": {"1": [10, 1.0]}}
    return made


def timed(name: str, repeat: int, step_ms: float | None, accept: float | None = None, **work: object) -> RunRecord:
    """A point with a step time; those that draft have an accept length too."""
    made = record(name, repeat, 10.0, **work)
    made.metrics |= {"accept_length": accept}
    made.counters = {**made.counters, "steps_by_rows": {} if step_ms is None else {"1": [10, step_ms / 100]}}
    return made
