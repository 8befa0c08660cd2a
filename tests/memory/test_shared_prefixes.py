"""Which requests share the first pages of their KV, and where reading those once pays."""

from __future__ import annotations

from random import Random

import pytest
from shared_prefixes import share_always

from specbatch.memory.shared_prefixes import LEAST_SAVED, MOST_GROUPS, MOST_ROWS, PrefixGroups, SharedPrefixPlanner

SYSTEM, BLOCK = list(range(1, 101)), list(range(500, 600))  # pages


def groups(plan: PrefixGroups | None) -> dict[tuple[int, ...], int]:
    """Members -> tokens of their prefix."""
    if plan is None:
        return {}
    found = {}
    for first, count, keys in plan.groups.T.tolist():
        if count:
            members = plan.members[first : first + count].tolist()
            assert all(plan.lengths[member] == keys for member in members)
            found[tuple(sorted(members))] = keys
    assert sum(map(len, found)) == (plan.lengths > 0).sum()
    return found


def planner(pages: dict[int, list[int]], key_bytes: int = 4096) -> SharedPrefixPlanner:
    found = SharedPrefixPlanner(16, key_bytes)
    for slot, own in pages.items():
        found.add(slot, own)
    return found


def test_one_group_in_the_order_of_the_step() -> None:
    found = planner({slot: [*SYSTEM, 1000 + slot] for slot in range(1, 65)} | {99: [7, 8]})
    plan = found.plan([99, *range(64, 0, -1)])
    assert groups(plan) == {tuple(range(1, 65)): 1600}
    assert plan is not None
    assert plan.lengths[0] == 0
    assert plan.saved == 63 * 1600


def test_too_little_to_save() -> None:
    pages = {slot: [*SYSTEM, 1000 + slot] for slot in range(1, 9)}
    slots, some = list(pages), LEAST_SAVED // (8 * 1600)  # bytes of a token at which about as much is read
    assert planner(pages, some // 2).plan(slots) is None
    assert groups(planner(pages, 4 * some).plan(slots)) == {tuple(range(8)): 1600}
    assert planner(pages, 4 * some).plan([1, 2]) is None  # a tile of rows for two
    assert planner({1: SYSTEM}, 4 * some).plan([1]) is None


def test_steps_with_many_rows_share_nothing() -> None:
    found, slots = SharedPrefixPlanner(16, 4096, group=4), list(range(1, 65))
    for slot in slots:
        found.add(slot, SYSTEM)
    plan = found.plan(slots, MOST_ROWS // 4)
    assert plan is not None
    assert found.plan(slots, MOST_ROWS // 4 + 1) is None
    assert found.plan(slots, 1) is plan


def test_nested_prefixes_share_what_saves_most() -> None:
    """Four blocks of examples after one system prompt: with long blocks each is a group, with short ones all are."""

    def plan(block: int) -> dict[tuple[int, ...], int]:
        pages = {slot: [*SYSTEM, *(1000 * (slot % 4 + 1) + page for page in range(block)), 9000 + slot]
                 for slot in range(1, 65)}  # fmt: skip
        return groups(planner(pages).plan(list(range(1, 65))))

    assert sorted(plan(100).values()) == [3200] * 4
    assert plan(2) == {tuple(range(64)): 1600}


def test_a_group_within_a_group() -> None:
    pages = {slot: [*SYSTEM, *(BLOCK if slot <= 32 else [])] for slot in range(1, 65)}
    plan = planner(pages).plan(list(range(1, 65)))
    assert groups(plan) == {tuple(range(32)): 3200, tuple(range(32, 64)): 1600}


def test_equal_pages_after_different_ones_are_not_shared() -> None:
    pages = {slot: [1000 + slot, *SYSTEM] for slot in range(1, 65)}
    assert planner(pages).plan(list(range(1, 65))) is None


def test_plans_are_kept_until_they_change() -> None:
    pages = {slot: [*SYSTEM, 1000 + slot] for slot in range(1, 65)}
    found, slots = planner(pages), list(range(1, 65))
    plan = found.plan(slots)
    assert found.plan(list(slots)) is plan
    found.remove(3)
    found.remove(3)  # it may not have begun
    found.add(3, [*SYSTEM, 7777])
    assert found.plan(slots) is plan  # the same groups
    found.remove(3)
    found.add(3, [7777])
    assert groups(found.plan(slots)) == {tuple(place for place in range(64) if place != 2): 1600}
    assert found.plan(slots[:1]) is None
    for slot in slots:
        found.remove(slot)
    assert found.plan([]) is None
    assert not found._root.children


def test_more_groups_than_there_are_places() -> None:
    count = MOST_GROUPS + 6
    pages = {slot: [*range(1000 * (slot // 4 + 1), 1000 * (slot // 4 + 1) + 100 + slot // 4), 900000 + slot]
             for slot in range(4 * count)}  # fmt: skip
    plan = planner(pages).plan(list(range(4 * count)))
    assert len(groups(plan)) == MOST_GROUPS
    assert min(groups(plan).values()) == 16 * (100 + 6)  # the shortest are left out


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Groups have the same first pages, and the tree is what it would be without the requests that have gone."""
    share_always(monkeypatch)
    random, found, pages = Random(seed), SharedPrefixPlanner(4, 1), {}
    for _ in range(150):
        slot = random.randint(1, 12)
        found.remove(slot)
        if pages.pop(slot, None) is None:
            stem = random.choice([[], [1], [1, 2, 3], [1, 2, 4, 5], [6, 7]])
            pages[slot] = [*stem, *(100 * slot + page for page in range(random.choice([0, 1, 3])))]
            found.add(slot, pages[slot])
        slots = random.sample(sorted(pages), random.randint(0, len(pages)))
        plan = groups(found.plan(slots))
        assert plan == groups(planner_with(pages, slots))
        for members, keys in plan.items():
            assert len(members) > 1
            assert len({tuple(pages[slots[member]][: keys // 4]) for member in members}) == 1


def planner_with(pages: dict[int, list[int]], slots: list[int]) -> PrefixGroups | None:
    fresh = SharedPrefixPlanner(4, 1)
    for slot, own in pages.items():
        fresh.add(slot, own)
    return fresh.plan(slots)
