"""The choice of a verify budget: what it expects, how it learns, and throughput on a simulated device."""

from __future__ import annotations

import itertools

import pytest
from crossed import slow_but
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulated_budgets import Loop, chooser

from specbatch.config.draft_shape import auto_budgets
from specbatch.engine.schedule.draft_length import Choice, Requests
from specbatch.engine.schedule.step_model import StepModel
from specbatch.engine.schedule.verify_rows import VerifyRows
from specbatch.records.markdown import draft_length_lines


def of_requests(count: int) -> Requests:
    return Requests([512] * count, [0] * count, [256] * count)


def made(times: dict[int, float], size: int = 4, pads: bool = True) -> VerifyRows:
    """times: seconds by quarters of a draft."""
    found = VerifyRows(2, [1 + length / 4 for length in times], [size], pads=pads)
    found.model = StepModel([size], {size: times})
    return found


@pytest.mark.parametrize(
    ("most", "budgets"),
    [
        (1, (1.25, 1.5, 1.75, 2)),
        (3, (1.25, 1.5, 1.75, 2, 2.5, 3, 4)),
        (7, (1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 8)),
        (63, (1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)),
    ],
)
def test_budgets_to_choose_from(most: int, budgets: tuple[float, ...]) -> None:
    assert auto_budgets(most) == budgets


def test_chosen_is_what_has_the_most_expected_tokens_per_second() -> None:
    """Two of eight drafts are likely to be accepted: two more rows for four requests are worth a tenth of the time."""
    values = [[0.9, 0.1], [0.9, 0.1], [0.1, 0.05], [0.1, -1.0]]
    found = made({2: 1.1, 4: 1.2, 8: 1.3})
    found.learn(Choice(2, kind=(4, 2, 4)), (), 0, 0, 0, values)
    choice = found.choose(4, lambda: of_requests(4))
    assert (choice.num_drafts, choice.budget, choice.members) == (2, 1.5, None)
    assert found._expected[4] == pytest.approx([1.8 / 4, 2.0 / 4, 2.25 / 4])
    cheap = made({2: 1.1, 4: 1.11, 8: 1.5})
    cheap.learn(Choice(2, kind=(4, 2, 4)), (), 0, 0, 0, values)
    assert cheap.choose(4, lambda: of_requests(4)).budget == 2


def test_padding_takes_rows_and_leaves_its_drafts_to_others() -> None:
    found = made({2: 1.0, 4: 1.0, 8: 1.0}, size=8)
    found.learn(Choice(2, kind=(8, 2, 8)), (), 0, 0, 0, [[0.5, 0.25], [0.5, 0.25]])
    assert found._expected[8] == pytest.approx([0.75, 0.75, 0.75])
    eager = made({2: 1.0, 4: 1.0, 8: 1.0}, size=8, pads=False)
    eager.learn(Choice(2, kind=(8, 2, 8)), (), 0, 0, 0, [[0.5, 0.25], [0.5, 0.25]])
    assert eager._expected[8] == pytest.approx([0.25, 0.5, 0.75])


@examples(30)
@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=4, max_size=4))
def test_the_choice_follows_from_the_values_before_it_alone(later: list[list[float]]) -> None:
    """What a step shows after a choice does not change it, whatever it is, and is known to the next one."""
    found, other = (made({2: 1.0, 4: 1.2, 8: 1.6}) for _ in range(2))
    first = [[0.9, 0.5]] * 4
    for one in (found, other):
        one.learn(Choice(2, kind=(4, 2, 4)), (), 0, 0, 0, first)
    choice = found.choose(4, lambda: of_requests(4))
    found.learn(choice, (), 0, 0, 0, later)
    assert other.choose(4, lambda: of_requests(4)) == choice
    share = 1 + 2 / 3 * (sum(map(sum, later)) / sum(map(sum, first)) - 1)
    assert found._expected[4][-1] == pytest.approx(share * other._expected[4][-1])


def test_sizes_that_have_not_run_expect_what_the_nearest_one_does() -> None:
    found = chooser(128, 3)
    found.learn(Choice(3, kind=(128, 12, 128)), (), 0, 0, 0, [[0.2, 0.01, 0.01]] * 128)
    found.learn(Choice(3, kind=(1, 12, 1)), (), 0, 0, 0, [[0.9, 0.9, 0.9]])
    assert found.choose(100, lambda: of_requests(100)).budget < 2
    assert found.choose(2, lambda: of_requests(2)).budget == 4


def test_report_lists_chosen_budgets_by_batch() -> None:
    runs = [{"verify_budgets": {"128": {"2": 97, "2.5": 3}, "8": {"4": 15}, "1": {"4": 1}}}, {}]
    runs.append({"verify_budgets": {"128": {"2": 100}}})
    times = {"128": {"2": 0.01162, "2.5": 0.01396}, "8": {"4": 0.0055}}
    assert draft_length_lines(runs, {"verify_budget_s": times}) == [
        "batch 8: rows verified per request 4 in 100% of 15 steps (ms at start with 4: 5.50)",
        "batch 128: rows verified per request 2 in 98%, 2.5 in 2% of 200 steps (ms at start with 2: 11.62, 2.5: 13.96)",
    ]


def test_before_the_first_result_large_batches_verify_little() -> None:
    found = chooser(512, 7)
    first = {rows: found.choose(rows, lambda rows=rows: of_requests(rows)).budget for rows in (1, 512)}
    assert first[1] == 8
    assert first[512] < 2


# The confidence of drafts, and how often they are right: as they say; more often; less often, and later ones less so.
KINDS = [(0.7, (1.0, 1.0)), (0.5, (0.6, 0.9)), (0.4, (1.5, 0.85))]
QUICK = [((128, 7), KINDS[2])]


@pytest.mark.parametrize(
    ("size", "kind"), slow_but(QUICK, itertools.product(itertools.product((1, 8, 32, 128, 256, 512), (3, 7)), KINDS))
)
def test_auto_is_as_fast_as_the_best_fixed_budget(
    size: tuple[int, int], kind: tuple[float, tuple[float, float]]
) -> None:
    """What it has to learn and its probes included; slow ones try all budgets, the quick ones those near the best."""
    rows, drafts = size
    loop = Loop(rows, drafts, *kind)
    found, steps = loop.run(200), 200
    [(most, _)] = loop.used.most_common(1)
    budgets = auto_budgets(drafts)
    near = [budget for budget in budgets if most / 1.7 < budget < most * 1.7] if (size, kind) in QUICK else budgets
    assert found > 0.98 * max(Loop(rows, drafts, *kind, budget=budget).run(steps) for budget in near)
    if rows >= 128:
        assert found > 1.05 * Loop(rows, drafts, *kind, budget=1.0 + drafts).run(steps)


@pytest.mark.parametrize(("rows", "kind"), slow_but([(512, KINDS[2])], itertools.product((8, 128, 256, 512), KINDS)))
def test_drafts_stop_where_no_budget_pays(rows: int, kind: tuple[float, tuple[float, float]]) -> None:
    """With `draft_tokens="auto"`, too, which costs probes in which the drafter catches up."""
    loop, steps = Loop(rows, 3, *kind, may_idle=True), 200 if rows > 8 else 400
    found = loop.run(steps)
    budgets = (1.0, 1.25) if (rows, kind) == (512, KINDS[2]) else (1.0, *auto_budgets(3))
    fixed = {budget: Loop(rows, 3, *kind, budget=budget).run(steps) for budget in budgets}
    assert found > 0.97 * max(fixed.values())
    if rows == 512 and kind == KINDS[2]:
        assert loop.used[1.0] > 0.9 * steps
