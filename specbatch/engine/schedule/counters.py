"""Counters of what the runner launched and how long it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Counters:
    """Counts and times in seconds since the record was opened. An iteration is one decode step."""

    iterations: int = 0
    iteration_rows: int = 0  # requests, summed over iterations
    iteration_s: float = 0.0  # host time spent launching iterations and waiting for their results
    prefill_passes: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0  # host time spent launching
    void_results: int = 0  # results for requests that had ended or were retracted
    host_waits: int = 0  # waits for an iteration with nothing launched after it: the device runs dry
    overlapped: int = 0  # iterations launched directly after one that was not handled yet
    late_launches: int = 0  # of those, launched after the previous one was done: the device ran dry
    launch_lead_s: float = 0.0  # summed over overlapped: from the end of a launch to the result of the previous one
    device_s: float = 0.0  # device time of iterations, without those that recorded a graph first
    device_steps: int = 0
    device_idle_s: float = 0.0  # device time between consecutive iterations with no prefill between them
    device_gaps: int = 0
    # By the number of requests, as text: iterations and their seconds. Device time and the gap before it where known;
    # without a CUDA device the host's time for launching and waiting.
    steps_by_rows: dict[str, list[float]] = field(default_factory=dict)
    # Iterations by batch bucket and number of drafts, with draft_tokens="auto".
    draft_lengths: dict[int, dict[int, int]] = field(default_factory=dict)

    def add_step(self, rows: int, seconds: float) -> None:
        entry = self.steps_by_rows.setdefault(str(rows), [0, 0.0])
        entry[0] += 1
        entry[1] += seconds

    def add_draft_length(self, bucket: int, drafts: int) -> None:
        steps = self.draft_lengths.setdefault(bucket, {})
        steps[drafts] = steps.get(drafts, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        lengths = {
            str(rows): {str(n): count for n, count in steps.items()} for rows, steps in self.draft_lengths.items()
        }
        return asdict(self) | {"draft_lengths": lengths}
