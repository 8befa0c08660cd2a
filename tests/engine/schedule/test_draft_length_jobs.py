"""`draft_tokens="auto"` in jobs that begin with an empty batch and nothing learnt: their time against that of no drafts
and of each fixed length."""

from __future__ import annotations

import itertools

import pytest
from crossed import slow_but
from simulated_device import LENGTHS, Acceptance, auto, falling
from simulated_jobs import Job

HIGH, FALLING, LOW, LOWEST = falling(0.9, 0.5), falling(0.8, 0.35), falling(0.67, 0.1), falling(0.45, 0.03)
ACCEPTANCE = {"high": HIGH, "falling": FALLING, "low": LOW, "lowest": LOWEST}
BURSTS = itertools.product((8, 32, 128, 512), (128, 512, 2048, 8192), ACCEPTANCE)


def compare(rows: int, context: int, acceptance: Acceptance, output: int, **how: int) -> tuple[float, float]:
    """Speed of `auto` over that of no drafts, and over that of the best fixed number."""
    times = [Job(rows, context, acceptance, output, fixed=n, **how).run() for n in LENGTHS]
    found = Job(rows, context, acceptance, output, chooser=auto(512), **how).run()
    return times[0] / found, min(times) / found


@pytest.mark.parametrize(
    ("rows", "context", "acceptance"),
    slow_but([(128, 512, "falling")], (point for point in BURSTS if point[0] * point[1] <= 1 << 20)),
)
def test_a_burst_of_requests(rows: int, context: int, acceptance: str) -> None:
    over_none, over_best = compare(rows, context, ACCEPTANCE[acceptance], 256)
    assert over_none > 0.99
    assert over_best > 0.98


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "context", "output", "how"),
    [
        (512, 128, 256, {"chunk": 16_384}),
        (512, 128, 256, {"cached": True}),
        (128, 512, 1024, {}),
        (512, 128, 128, {}),
        (512, 128, 256, {"total": 1536, "stops": True}),
        (128, 2048, 256, {"total": 384, "stops": True}),
    ],
)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_jobs_of_other_kinds(rows: int, context: int, output: int, how: dict[str, int], acceptance: str) -> None:
    over_none, over_best = compare(rows, context, ACCEPTANCE[acceptance], output, **how)
    assert over_none > 0.98
    assert over_best > 0.97


def test_the_first_requests_of_a_large_batch_do_not_catch_up() -> None:
    """512 requests whose batch is not to draft. The first 64 and 128 draft while the other prompts are computed, as far
    as that takes no catching up; that would take 9% of the time."""
    job = Job(512, 128, LOWEST, output=128, chooser=auto(512))
    assert Job(512, 128, LOWEST, output=128).run() > 0.985 * job.run()
    assert job.catch_up_s == 0.0
