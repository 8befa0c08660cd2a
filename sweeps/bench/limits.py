"""Metrics of `bench` that compare a measured step or TTFT with memory bandwidth and GEMM time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import Point
from specbatch.sweeps.bench.traffic import step_bytes, verify_rows, without_gemms
from specbatch.sweeps.machine.limits import data_sheet_bandwidth, gemm_seconds
from specbatch.sweeps.run.loading import noted

if TYPE_CHECKING:
    from specbatch.engine.engine import Engine


@dataclass(frozen=True)
class Limits:
    """machine: what `measure_machine` found. gemm_times: by rows of a pass and of its head, each measured once."""

    machine: Mapping[str, float | None]
    gemm_times: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, engine: Engine, point: Point, record: RunRecord) -> None:
        """Add the metrics of a section to its record; closed loops have none, and steps with a draft model neither."""
        work, metrics = record.workload, record.metrics
        alone, concurrency = work["sequential"], point.concurrency
        if work["section"] == "closed" or (engine.config.speculation.entry.loads_draft and not alone):
            return
        rows = work["input_len"] if alone else verify_rows(engine.caps, concurrency)
        head_rows = 1 if alone else rows
        time = metrics["median_ttft_s"] if alone else metrics["step_s"]
        if not alone:
            metrics |= self._of_bytes(step_bytes(engine, concurrency, work), time, record.gpu)
        if why := without_gemms(engine.model_config):
            work["remarks"] = [f"GEMMs alone: not measured, because {why}"]
            return
        errors: dict[str, str] = {}
        with noted(errors, "gemm_s"):  # such as no memory for the weights: only these columns are lost
            if (rows, head_rows) not in self.gemm_times:
                dtype = getattr(torch, engine.caps["dtype"])
                seconds = gemm_seconds(engine.model_config, rows, dtype, engine.device, head_rows=head_rows)
                self.gemm_times[rows, head_rows] = seconds
        if errors:
            work["remarks"] = [f"GEMMs alone: not measured ({errors['gemm_s']})"]
            return
        metrics["gemm_s"] = gemm_s = self.gemm_times[rows, head_rows]
        metrics["times_gemms"] = time / gemm_s if time else None

    def _of_bytes(self, moved: float, step_s: float | None, gpu: str | None) -> dict[str, float | None]:
        sheet, read = data_sheet_bandwidth(gpu), self.machine.get("read_bytes_s")
        speed = moved / step_s if step_s else None
        return {
            "step_bytes": moved,
            "step_bandwidth": speed,
            "sheet_share": speed / sheet if speed and sheet else None,
            "read_share": speed / read if speed and read else None,
            "floor_s": moved / read if read else None,
        }
