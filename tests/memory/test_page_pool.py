"""Reference-counted page allocator: counts, and errors on misuse."""

from __future__ import annotations

import pytest

from specbatch.memory.page_pool import PagePool


def test_pages_are_freed_by_their_last_holder() -> None:
    pool = PagePool(3)
    taken = pool.take(2)
    assert sorted(taken) == [1, 2]
    assert pool.free == 1
    pool.hold(taken[0])
    assert pool.holders(taken[0]) == 2
    pool.release(taken[0])
    assert pool.free == 1
    pool.release(taken[0])
    assert (pool.free, pool.holders(taken[0])) == (2, 0)


def test_page_0_is_never_allocated() -> None:
    pool = PagePool(5)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.take(0) == []


def test_allocating_more_than_free_raises() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(RuntimeError, match="2 pages requested, 1 free"):
        pool.take(2)
    assert pool.free == 1


def test_misuse_raises() -> None:
    pool = PagePool(2)
    page, other = pool.take(2)
    pool.keep(page)
    with pytest.raises(RuntimeError, match="cached twice"):
        pool.keep(page)
    with pytest.raises(RuntimeError, match="is not cached"):
        pool.drop(other)
    pool.release(page)
    pool.release(other)
    for free in (0, page, other):
        with pytest.raises(RuntimeError, match="released twice"):
            pool.release(free)
    with pytest.raises(RuntimeError, match="is free"):
        pool.hold(other)
    assert pool.free == 1


def test_idle_counts_pages_held_by_the_cache_only() -> None:
    pool = PagePool(3)
    page, other, _ = pool.take(3)
    pool.keep(page)
    assert pool.idle == 0
    pool.release(page)
    assert (pool.idle, pool.free) == (1, 0)
    pool.hold(page)
    assert pool.idle == 0
    pool.release(page)
    pool.drop(page)
    assert (pool.idle, pool.free, pool.holders(page)) == (0, 1, 0)
    pool.keep(other)
    pool.drop(other)
    assert (pool.idle, pool.holders(other)) == (0, 1)
