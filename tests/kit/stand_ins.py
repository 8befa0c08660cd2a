"""Stand-ins for parts of an engine: CUDA graphs without CUDA, results that arrive late, random or planned draft
lengths, a timer of steps, a quantizing activation that notes what it is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from specbatch.config.draft_shape import QUARTERS
from specbatch.core.async_copy import AsyncCopy, StepTimer
from specbatch.engine.schedule.draft_length import Choice, DraftLength
from specbatch.engine.schedule.step_model import StepModel
from specbatch.kernels.common.rehearsal import is_rehearsing, rehearse
from specbatch.kernels.gemm.quantized import fp8_linear
from specbatch.kernels.gemm.quantized.fp8_activations import FP8Activations
from specbatch.kernels.gemm.quantized.fp8_quantize import silu_and_mul_fp8
from specbatch.runtime.cuda_graphs import Program, Recorder, nothing


class FakeRecorder(Recorder):
    """`cuda_graphs.Recorder` without CUDA: a recording runs its program again, on fixed tensors as a graph would.

    It cannot show that a program launches something a graph cannot hold: tests/test_gpu.py records for real.
    """

    def __init__(self, device: torch.device, *, may_leave_out: bool = True) -> None:
        self.recorded = 0
        self._may_leave_out = may_leave_out

    def _take_pool(self) -> None:
        pass

    def warm(self, program: Program) -> None:
        if is_rehearsing():
            rehearse(program)
        else:
            program()

    def record(self, program: Program) -> Program:
        if is_rehearsing():
            return nothing
        self.recorded += 1
        return program


def fake_graphs(patch: pytest.MonkeyPatch, recorder: type[FakeRecorder] = FakeRecorder) -> None:
    """Engines on a CPU accept graphs, and record them with `recorder`."""
    patch.setattr("specbatch.engine.setup.builder.Recorder", recorder)
    patch.setattr("specbatch.engine.setup.prepare.check_device", lambda config, device: None)


def late_results(patch: pytest.MonkeyPatch, late: bool = True) -> None:
    """The device is never done when the host asks: the overlapped schedule runs as far ahead as it may. Not late: it is
    always done."""
    patch.setattr(AsyncCopy, "ready", lambda self: not late)


def no_step_times(patch: pytest.MonkeyPatch) -> None:
    """Engines with `draft_tokens="auto"` neither time steps at start nor learn from step times."""
    patch.setattr(DraftLength, "took", lambda *_: None)
    patch.setattr("specbatch.engine.setup.builder.measure_catch_up", lambda *_, **__: (1e-3, 1e-4))

    def constant(worker: object, buckets: list[int], lengths: Sequence[int], **_: object) -> StepModel:
        return StepModel(buckets, {size: dict.fromkeys(lengths, 1.0) for size in buckets})

    patch.setattr("specbatch.engine.setup.builder.measure_step_times", constant)


def steep_step_times(patch: pytest.MonkeyPatch, row_s: float = 0.2) -> None:
    """Engines with `verify_budget="auto"` take a step for a second, and `row_s` for each draft of a request."""
    no_step_times(patch)

    def steep(worker: object, buckets: list[int], lengths: Sequence[int], **_: object) -> StepModel:
        return StepModel(
            buckets, {size: {length: 1 + row_s * length / QUARTERS for length in lengths} for size in buckets}
        )

    patch.setattr("specbatch.engine.setup.builder.measure_step_times", steep)


def _chosen_by(patch: pytest.MonkeyPatch, choose: Callable[[DraftLength, int], Choice]) -> None:
    no_step_times(patch)
    patch.setattr(DraftLength, "choose", lambda self, rows, describe: choose(self, rows))


def random_draft_lengths(patch: pytest.MonkeyPatch, seed: int = 5) -> None:
    """`draft_tokens="auto"` chooses at random, some lengths for several steps, at times for some of the requests only,
    and measures no times. Whether the draft runs for prompts is random, too."""
    chance, chosen, share = random.Random(seed), [0], [1.0]

    def choose(self: DraftLength, rows: int) -> Choice:
        if chance.random() < 0.6:  # with a budget, 0 verifies no drafts
            chosen[0] = chance.choice([0, *self.draft_lengths])
            share[0] = chance.choice([0.5, 0.8, 1.0])
        some = int(share[0] * rows)
        if self.is_auto and self.can_split and 0 < some < rows and chosen[0]:
            return Choice(chosen[0], sorted(chance.sample(range(rows), some)))
        num_drafts, budget = self.form(chosen[0])
        return Choice(num_drafts, budget=budget)

    _chosen_by(patch, choose)
    patch.setattr(DraftLength, "drafts_prompts", lambda *_: chance.random() < 0.7)


def planned_draft_lengths(patch: pytest.MonkeyPatch, plan: list[int], after: int = 0) -> None:
    """`draft_tokens="auto"` chooses these lengths, a step each, and takes them out of the list; then `after`. No times
    are measured, and the draft runs for all prompts."""
    _chosen_by(patch, lambda self, rows: Choice(plan.pop(0) if plan else after))
    patch.setattr(DraftLength, "drafts_prompts", lambda *_: True)


class OneSecond(StepTimer):
    """A decode step or prefill pass takes one second and follows the previous one after half a second."""

    def __init__(self, is_prefill: bool) -> None:
        self.is_prefill = is_prefill
        self._previous: StepTimer | None = None

    @classmethod
    def begin(cls, device: torch.device, *, is_prefill: bool = False) -> StepTimer:
        return cls(is_prefill)

    def end(self, previous: StepTimer | None) -> None:
        self._previous = previous

    def seconds(self) -> tuple[float, float | None]:
        return 1.0, None if self._previous is None else 0.5


def timed_by(patch: pytest.MonkeyPatch, timer: type[StepTimer] = OneSecond) -> None:
    """Decode steps have a device time, as on a GPU."""
    patch.setattr("specbatch.engine.schedule.runner.StepTimer", timer)


def quantized_by_activations(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Types of what `silu_and_mul_fp8` is given from now on by FP8 layers."""
    seen: list[torch.dtype] = []

    def quantized(gate_up: torch.Tensor) -> FP8Activations:
        seen.append(gate_up.dtype)
        return silu_and_mul_fp8(gate_up)

    monkeypatch.setattr(fp8_linear, "silu_and_mul_fp8", quantized)
    return seen
