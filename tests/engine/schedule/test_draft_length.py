"""Choice of the draft length on a simulated device with given step times and acceptance: throughput against the best
fixed length, probes, and adaptation."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import pytest
from crossed import crossed, first_quick

from specbatch.config.draft_shape import auto_draft_lengths
from specbatch.engine.schedule.acceptance_by_context import range_of
from specbatch.engine.schedule.draft_length import Choice, DraftLength, Requests
from specbatch.engine.schedule.step_model import StepModel, rising
from specbatch.records.markdown import draft_length_lines

Times = Callable[[int], float]


@pytest.mark.parametrize(
    ("most", "lengths"), [(1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 2, 3)), (7, (0, 1, 2, 4, 7)), (8, (0, 1, 2, 4, 8))]
)
def test_lengths_are_zero_powers_of_two_and_the_most(most: int, lengths: tuple[int, ...]) -> None:
    assert auto_draft_lengths(most) == lengths


def chooser(times: Mapping[int, Mapping[int, float]]) -> DraftLength:
    """With these times, which do not depend on the context."""
    found = DraftLength(tuple(next(iter(times.values()))), sorted(times))
    found.model = StepModel(found.buckets, times)
    return found


def alike(rows: int, context: int = 100, missing: int = 0) -> Requests:
    return Requests([context] * rows, [missing] * rows, [1000] * rows)


def learn(chooser: DraftLength, choice: Choice, accepted: Sequence[int], context: int = 100) -> None:
    emitted = sum(accepted) + len(accepted)
    chooser.learn(choice, [(context, count) for count in accepted], emitted, emitted, 0)


def shares(chooser: DraftLength, context: int = 100) -> list[float]:
    return chooser.acceptance.shares(range_of(context))


class World:
    """Requests accept draft j with probability p[j] if all before it were accepted; a step of n drafts takes times(n)
    seconds; results are known one step late."""

    def __init__(self, rows: int, most: int, times: Times, seed: int = 0) -> None:
        self.rows, self.most, self.times = rows, most, times
        self.random = random.Random(seed)
        self.chooser = chooser({rows: {n: times(n) for n in auto_draft_lengths(most)}})
        self.tokens, self.seconds = 0, 0.0
        self.missing = 0  # tokens of each request, before a step that drafts
        self.steps: Counter[int] = Counter()
        self.probes = 0
        self.late: tuple[Choice, list[int], float] | None = None

    def run(self, steps: int, p: list[float], extra: Times = lambda n: 0.0) -> float:
        """Tokens per second of these steps; extra: seconds beyond the times that were measured at start."""
        tokens, start = self.tokens, self.seconds
        for _ in range(steps):
            choice = self.chooser.choose(self.rows, lambda: alike(self.rows, missing=self.missing))
            length = choice.num_drafts
            self.steps[length] += 1
            self.probes += choice.probing and not choice.timing
            accepted = [self._accept(p[:length]) for _ in range(self.rows)]
            took = (self.times(length) + extra(length)) * self.random.uniform(0.98, 1.02)
            self.tokens += sum(accepted) + self.rows
            self.seconds += took
            if self.late is not None:
                before, counts, seconds = self.late
                self.chooser.took(before, seconds)
                learn(self.chooser, before, counts)
            self.late = (choice, accepted, took)
        return (self.tokens - tokens) / (self.seconds - start)

    def _accept(self, p: list[float]) -> int:
        return next((place for place, share in enumerate(p) if self.random.random() >= share), len(p))

    def fixed(self, length: int, p: list[float], extra: Times = lambda n: 0.0) -> float:
        left = 1 + sum(accumulate(p[:length], lambda one, other: one * other))
        return self.rows * left / (self.times(length) + extra(length))


# As measured: verifying drafts of 128 requests takes long, of a single one hardly longer than decoding.
LARGE: Times = lambda n: 8.62e-3 + (1.4e-3 + 2.0e-3 * n if n else 0.1e-3)  # noqa: E731
SMALL: Times = lambda n: 4.14e-3 + 0.35e-3 * n  # noqa: E731


@pytest.mark.parametrize(("rows", "times"), first_quick(1, [(32, LARGE), (128, LARGE), (32, SMALL), (1, SMALL)]))
@pytest.mark.parametrize(("most", "p"), crossed([3, 15], [0.0, 0.3, 0.6, 0.95]))
def test_no_slower_than_off_or_the_most(most: int, rows: int, times: Times, p: float) -> None:
    """Within 2% of the better of both; the whole feature may cost 3%."""
    world, chances = World(rows, most, times), [p] * most
    found = world.run(2000 if rows > 1 else 8000, chances)
    assert found > 0.98 * max(world.fixed(length, chances) for length in (0, most))
    best = max(auto_draft_lengths(most), key=lambda length: world.fixed(length, chances))
    assert found > 0.97 * world.fixed(best, chances)


@pytest.mark.parametrize(
    ("p", "clock"), first_quick(1, [(0.6, 1.5), (0.3, 0.7), *itertools.product([0.4, 0.5, 0.7], [0.7, 1.5])])
)
def test_another_clock_rate_than_at_start_does_not_matter(p: float, clock: float) -> None:
    """All step times change by a factor, so by different amounts."""
    world = World(32, 3, LARGE)
    for _ in range(2):
        found = world.run(2000, [p] * 3, extra=lambda n: (clock - 1) * LARGE(n))
    best = max(world.fixed(n, [p] * 3, lambda n: (clock - 1) * LARGE(n)) for n in range(4))
    assert found > 0.98 * best


@pytest.mark.parametrize(
    ("rows", "times", "p"),
    crossed([(1, SMALL), (8, lambda n: 5e-3 + 1.2e-3 * n), (64, LARGE)], [0.05, 0.3, 0.6, 0.8, 0.9]),
)
def test_the_initial_guess_of_acceptance_costs_little(rows: int, times: Times, p: float) -> None:
    """4% of the first 400 steps; a guess of 0.3 would cost half of some."""
    worlds = [World(rows, 15, times, seed) for seed in range(4)]
    best = max(worlds[0].fixed(length, [p] * 15) for length in auto_draft_lengths(15))
    assert sum(world.run(400, [p] * 15) for world in worlds) / len(worlds) > 0.96 * best


def test_times_at_start_rise_with_batch_and_length() -> None:
    """Noise is bounded by the times of more requests or drafts; times that rise already do not change."""
    true = {rows: {n: 1.0 + n * (1 + rows / 8) for n in (0, 1, 2, 4)} for rows in (1, 4, 32)}
    assert rising(true) == true
    assert [list(row) for row in rising(true).values()] == [[0, 1, 2, 4]] * 3
    randomness = random.Random(3)
    noisy = {rows: {n: t + randomness.choice((0, 0, 30.0)) for n, t in row.items()} for rows, row in true.items()}
    noisy[32][4] = true[32][4]  # the largest, which nothing bounds
    found = rising(noisy)
    assert noisy != true
    for rows, row in found.items():
        for n, seconds in row.items():
            assert true[rows][n] <= seconds <= noisy[rows][n]
            assert all(
                seconds <= found[more][longer] for more in true for longer in row if more >= rows and longer >= n
            )


@pytest.mark.parametrize(("p", "wanted"), [(0.05, 0), (0.98, 15)])
def test_no_drafts_where_few_are_accepted_and_the_most_where_all_are(p: float, wanted: int) -> None:
    world = World(8, 15, SMALL)
    world.run(2000, [p] * 15)
    assert world.steps[wanted] > 0.95 * 2000


@pytest.mark.parametrize("rows", first_quick(1, [8, 128]))
def test_it_adapts_when_acceptance_changes(rows: int) -> None:
    world = World(rows, 7, SMALL)
    for p, wanted in ((0.02, 0), (0.95, 7), (0.02, 0), (0.95, 7)):
        world.run(3000, [p] * 7)
        world.steps.clear()
        world.run(500, [p] * 7)
        assert world.steps.most_common(1)[0][0] == wanted


def test_probes_cost_less_than_one_percent() -> None:
    """On a device where the longest draft takes ten times as long as none."""
    world = World(16, 15, lambda n: 8e-3 * (1 + 0.6 * n))
    world.run(1000, [0.2] * 15)
    world.probes, before = 0, Counter(world.steps)
    found = world.run(10_000, [0.2] * 15)
    assert found > 0.99 * world.fixed(0, [0.2] * 15)
    made = world.steps - before
    assert world.probes == 10_000 - made[0]
    assert made[15] >= 4
    assert not made[1]  # the time of a length that is far from the best does not matter


def test_a_longer_context_makes_drafts_cheaper() -> None:
    """Steps that all take longer than at start shift all lengths; by the times at start 0 is best."""
    world, p = World(64, 3, lambda n: 5e-3 + 3e-3 * n), [0.55] * 3
    world.run(1000, p)
    assert world.steps.most_common(1)[0][0] == 0
    world.steps.clear()
    world.run(1000, p, extra=lambda n: 10e-3)
    assert world.fixed(3, p, lambda n: 10e-3) > 1.05 * world.fixed(0, p, lambda n: 10e-3)
    assert world.steps[0] < 300


def test_probes_correct_a_wrong_time() -> None:
    world, p = World(16, 3, lambda n: 5e-3 + 4e-3 * n), [0.9] * 3
    world.run(6000, p, extra=lambda n: -3e-3 * n)  # drafts cost a quarter of what they did at start
    world.steps.clear()
    world.run(200, p, extra=lambda n: -3e-3 * n)
    assert world.steps.most_common(1)[0][0] == 3


def test_an_outlier_changes_little() -> None:
    world = World(8, 7, SMALL)
    world.run(500, [0.02] * 7)
    world.chooser.took(world.chooser.choose(8, lambda: alike(8)), 30.0)
    world.steps.clear()
    world.run(100, [0.02] * 7)
    assert world.steps[0] > 90


def test_each_batch_size_has_its_own_length() -> None:
    times = {rows: {n: SMALL(n) for n in range(4)} for rows in (1, 4)} | {128: {n: 5e-3 * (1 + n) for n in range(4)}}
    found = chooser(times)
    for _ in range(200):
        learn(found, Choice(3), [2, 3, 0, 1])
    assert [found.choose(rows, lambda: alike(rows)).num_drafts for rows in (1, 2, 5, 100)] == [3, 3, 0, 0]  # noqa: B023


def test_acceptance_is_estimated_by_position() -> None:
    found = chooser({8: dict.fromkeys((0, 1, 2, 4), 1.0)})
    for _ in range(2000):
        learn(found, Choice(4), [0, 1, 1, 2, 2, 3, 4, 4])
    assert shares(found) == pytest.approx([7 / 8, 5 / 7, 3 / 5, 2 / 3], rel=0.01)
    for _ in range(2000):  # positions that are not tried do not change
        learn(found, Choice(1), [1] * 8)
    assert shares(found) == pytest.approx([1, 5 / 7, 3 / 5, 2 / 3], rel=0.05)
    for _ in range(2000):
        learn(found, Choice(0), [0] * 8)
    assert shares(found)[0] > 0.99


def test_untried_positions_use_the_acceptance_of_the_previous_one() -> None:
    found = chooser({8: dict.fromkeys(range(4), 1.0)})
    for _ in range(1000):
        learn(found, Choice(1), [1, 0, 0, 0])
    assert shares(found) == pytest.approx([0.25] * 3, rel=0.01)


def test_acceptance_follows_the_nearest_contexts_until_it_is_known() -> None:
    found = chooser({8: {0: 1.0, 1: 1.0}})
    assert shares(found, 4096) == pytest.approx([0.8])  # the guess
    for _ in range(100):
        learn(found, Choice(1), [1, 1, 1, 0], context=512)
        learn(found, Choice(1), [1, 0, 0, 0], context=8192)
    near, middle, far = (shares(found, context)[0] for context in (1024, 2048, 30_000))
    assert 0.6 < near < 0.75
    assert middle == pytest.approx(0.5, abs=0.01)
    assert 0.25 < far < 0.3
    for _ in range(50):
        learn(found, Choice(1), [1] * 4, context=2048)
    assert shares(found, 2048)[0] > 0.8
    assert shares(found, 512)[0] == pytest.approx(0.75, abs=0.05)


def test_acceptance_is_kept_while_nothing_is_drafted() -> None:
    """One lucky draft after a long time changes little."""
    found = chooser({1: {0: 1.0, 1: 1.0}})
    for _ in range(500):
        learn(found, Choice(1), [0])
    for _ in range(5000):
        learn(found, Choice(0), [0])
    learn(found, Choice(1), [1])
    assert shares(found)[0] < 0.1


def test_small_gains_do_not_change_the_length() -> None:
    """Half of the single drafts are accepted; no drafts have costs that no step time shows, so they win ties."""
    for before, gain, wanted in ((0, 1.015, 0), (0, 1.03, 1), (1, 1.005, 1), (1, 0.99, 0)):
        times = {8: {0: 1.0, 1: 1.0 if before else 2.0}}
        found = chooser(times)
        for _ in range(1000):
            learn(found, Choice(1), [0, 1] * 4)
        assert found.choose(8, lambda: alike(8)).num_drafts == before
        times[8][1] = 1.5 / gain
        assert found.choose(8, lambda: alike(8)).num_drafts == wanted


def test_probes_count_the_time_of_catching_up() -> None:
    found = {}
    for seconds in (0.0, 1.0):
        world = World(32, 3, lambda n: 5e-3 * (1 + n))
        world.chooser.catch_up_s, world.missing = seconds, 1
        world.run(4000, [0.1] * 3)
        found[seconds] = world.probes
    assert found[0.0] > 5
    assert found[1.0] == 0  # 4000 steps of 5 ms are 20 s


def grown(accepted: Sequence[int]) -> DraftLength:
    """A draft takes 0.1 ms for up to 64 requests, and 4 ms for 512. It has learnt from steps in which requests accepted
    so many of 3 drafts."""
    found = chooser({size: {n: 5e-3 + of * n for n in range(4)} for size, of in ((8, 1e-4), (64, 1e-4), (512, 4e-3))})
    found.catch_up_s = 20e-6
    for _ in range(100):
        learn(found, Choice(3), accepted)
    return found


def test_a_growing_batch_catches_up_only_if_the_whole_batch_might_draft() -> None:
    """At 64 requests drafting pays even with what catching up takes, which 512 requests would have no use for."""
    for accepted, expected, drafts in (([0, 1], 64, True), ([0, 1], 512, False), ([3, 3], 512, True)):
        found = grown(accepted)
        requests = alike(64, missing=100)._replace(expected=expected)
        assert (found.choose(64, lambda: requests).num_drafts > 0) == drafts  # noqa: B023
        ready = alike(64)._replace(expected=expected)
        assert grown(accepted).choose(64, lambda: ready).num_drafts > 0  # noqa: B023


def test_the_drafter_runs_for_prompts_until_acceptance_is_known_and_where_it_might_pay() -> None:
    found = grown([])
    assert found.drafts_prompts(512, [100], [100], 100)
    learn(found, Choice(3), [0] * 32)
    assert found.drafts_prompts(512, [100], [100], 100)
    learn(found, Choice(3), [0] * 32)
    assert not found.drafts_prompts(512, [100], [100], 100)
    assert found.drafts_prompts(8, [100], [100], 100)
    for times, wanted in ((1.55, True), (1.7, False)):  # half of the drafts are accepted
        near = chooser({8: {0: 1.0, 1: times}})
        near.catch_up_s = 1e-9
        for _ in range(1000):
            learn(near, Choice(1), [0, 1] * 4)
        assert near.drafts_prompts(8, [100], [100], 100) == wanted
        assert near.choose(8, lambda: alike(8)).num_drafts == 0


def test_a_choice_is_made_for_the_middle_of_what_is_left() -> None:
    """Half of the drafts are accepted. A draft takes as long as 700 cached tokens, with which the time doubles."""
    for left, wanted in ((100, 0), (400, 1), (4000, 1)):
        found = chooser({1: {0: 1.0, 1: 1.6}})
        found.model = StepModel([1], {1: {0: 1.0, 1: 1.7}}, {1: {0: 1e-3, 1: 1e-3}})
        for _ in range(1000):
            learn(found, Choice(1), [0, 1])
        requests = Requests([300], [0], [left])
        assert found.choose(1, lambda: requests).num_drafts == wanted  # noqa: B023


def test_a_single_length_is_always_chosen() -> None:
    found = DraftLength((5,), [8])
    assert not found.is_auto
    assert [found.choose(rows, lambda: alike(8)).num_drafts for rows in (1, 8)] == [5, 5]
    assert found.drafts_prompts(8, [100], [10], 100)


def test_report_lists_chosen_lengths_by_batch() -> None:
    runs = [{"draft_lengths": {"128": {"3": 3, "0": 97}, "8": {"3": 15}, "16": {"0": 1}}}, {}]
    runs.append({"draft_lengths": {"128": {"0": 100}}})
    times = {"128": {"0": 0.00862, "3": 0.01596}, "8": {"0": 0.0042, "3": 0.00586}}
    assert draft_length_lines(runs, {"draft_length_s": times}) == [
        "batch 8: drafted 3 in 100% of 15 steps (ms at start with 0: 4.20, 3: 5.86)",
        "batch 128: drafted 0 in 98%, 3 in 2% of 200 steps (ms at start with 0: 8.62, 3: 15.96)",
    ]
    assert draft_length_lines([{}], {}) == []
