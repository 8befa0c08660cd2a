"""Records, sweeps and evals as if an engine had run: what reads them is tested without one."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from specbatch.config.engine_config import AUTO_GRAPHS, EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.evals.report import EvalReport
from specbatch.records.answers import Score
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import summarize


def metrics_of(*, verifies: int = 10, emitted: int = 20, ttft: float = 0.1, **more: Any) -> RequestMetrics:
    tpot = more.pop("tpot_s", 0.01)
    return RequestMetrics(
        prompt_tokens=8, output_tokens=emitted + 1, ttft_s=ttft, tpot_s=tpot, e2e_s=1.0, verify_steps=verifies,
        emitted=emitted, drafted=40, accepted=emitted - verifies, accept_length=emitted / verifies, **more,
    )  # fmt: skip


def _resolved(config: EngineConfig | None) -> EngineConfig:
    """The config as an engine on a CPU records it: without graphs, where they are chosen."""
    config = config or EngineConfig(speculation=Speculation("ngram", "v1"))
    return replace(config, graphs=Graphs()) if config.graphs == AUTO_GRAPHS else config


def make_record(
    rows: list[RequestMetrics],
    *,
    configuration: str | None = "v1",
    concurrency: int = 4,
    repeat: int = 1,
    duration: float = 2.0,
    config: EngineConfig | None = None,
    created: str = "2030-01-01T00:00:00+00:00",
    finish: str = "length",
    **work: Any,
) -> RunRecord:
    """What an engine would have recorded of requests with these numbers."""
    done = [Completion(index, [], [], "", finish, row) for index, row in enumerate(rows)]
    place = {"configuration": configuration, "concurrency": concurrency, "repeat": repeat, "place": 0}
    workload = {"dataset": "random", "output_len": 4, "prompts": len(rows), "prompts_sha256": "same", **work}
    return RunRecord(
        config=asdict(_resolved(config)),
        caps={"device": "cpu", "dtype": "float32", "max_running": 4},
        metrics=summarize(done, duration, concurrency),
        counters={},
        requests=[item.as_row() for item in done],
        workload=workload | (place if configuration else {}),
        versions={"torch": "2.13"},
        hardware={"cpu": "abacus", "cores": 2},
        created=created,
    )


def make_report(right: str, *, unparsed: float = 0.0, config: EngineConfig | None = None, **work: Any) -> EvalReport:
    """Answers to one question per letter of `right`: 1 is right. The filter "strict" finds the others right."""
    numbers = RequestMetrics(output_tokens=11, ttft_s=0.1, tpot_s=0.01, verify_steps=5, emitted=10, accept_length=2.0)
    done = [Completion(index, [], [], "", "stop", numbers) for index in range(len(right))]
    config = _resolved(config)
    record = RunRecord(
        asdict(config), {"device": "cpu", "dtype": "float32"}, summarize(done, 2.0), {},
        [item.as_row() for item in done], versions={}, hardware={"cpu": "abacus", "cores": 2},
    )  # fmt: skip
    rows = [
        {
            "doc_id": index, "repeat": 0, "prompt_hash": f"hash {index}", "finish_reason": "stop",
            "scores": {"loose": {"match": float(letter)}, "strict": {"match": 1 - float(letter)}},
        }
        for index, letter in enumerate(right)
    ]  # fmt: skip
    share = right.count("1") / len(right)
    scores = [Score("loose", "match", share, None, len(right), unparsed)]
    scores.append(Score("strict", "match", 1 - share, None, len(right), None))
    report = EvalReport(
        task="sums", task_version="1", lm_eval_version="0.4", data_source="here", num_fewshot=0, fewshot_source="none",
        seed=1, limit=None, chat_template=False, prompts_sha256="same", scores=scores, questions=rows, record=record,
        max_new_tokens=32,
    )  # fmt: skip
    record.workload.update({"command": "eval", **report.settings(), **work})
    return report
