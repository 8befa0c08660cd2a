"""Runs as pandas frames, for notebooks and scripts: points, requests and acceptance by draft position.

run = specbatch.load_run("out/sweep-20260102-030405")
run.points.pivot(index="concurrency", columns="configuration", values="output_throughput")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specbatch.jobs.output_files import read_output
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.runs import read_records

if TYPE_CHECKING:
    import pandas as pd

POINT = ("section", "configuration", "concurrency", "repeat")


class RunFrames(NamedTuple):
    """A run in three frames, which share the columns `path` and `POINT`. Times are in seconds, shares from 0 to 1.

    points    a row per record: settings, how it was started (`command`, `revision`, `driver`, `cuda`), and every metric
              under its name in the record
    requests  a row per request: the fields of requests.jsonl
    drafts    a row per record and draft position, from 1: verifies that drafted it (`drafted`), that also accepted all
              drafts before it (`tried`), and that accepted it (`accepted`)
    """

    points: pd.DataFrame
    requests: pd.DataFrame
    drafts: pd.DataFrame


def load_run(path: str | Path) -> RunFrames:
    """Load a folder of `sweep`, `bench`, `eval` or `check`, a part of one, an output of `generate`, or packed records.

    Raises SpecbatchError for a path without a record, or with one that is damaged.
    """
    import pandas as pd

    points, requests, drafts = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for place, record in read_records("path", Path(path), read_output):
        point = {"path": str(place), **{name: record.workload.get(name) for name in POINT}}
        points.append(point | _settings(record) | {key: record.metrics.get(key) for key in METRICS})
        requests += [point | row for row in record.requests]
        counts = record.counters.get("acceptance", {})
        each = zip(*(counts.get(name, ()) for name in ("drafted", "tried", "accepted")), strict=True)
        drafts += [
            point | {"position": number, "drafted": drafted, "tried": tried, "accepted": accepted}
            for number, (drafted, tried, accepted) in enumerate(each, 1)
        ]
    return RunFrames(*map(pd.DataFrame, (points, requests, drafts)))


def _settings(record: RunRecord) -> dict[str, Any]:
    config = record.config
    return {
        "model": config["model"],
        "load_format": config["load_format"],
        "processor": record.processor,
        "dtype": record.caps.get("dtype", config["dtype"]),
        "algorithm": config["speculation"]["algorithm"],
        "schedule": config["speculation"].get("schedule"),
        "draft_shape": record.caps.get("draft_shape"),
        "simulated_acceptance": record.simulated_acceptance,
        "command": record.command,
        "revision": record.revision,
        "driver": record.hardware.get("driver"),
        "cuda": record.hardware.get("cuda"),
        "created": record.created,
        "error": record.error,
    }
