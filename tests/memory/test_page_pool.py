"""Reference-counted page allocator: counts, and errors on misuse."""

from __future__ import annotations

import pytest

from specbatch.memory.page_pool import PagePool


def test_pages_are_freed_by_their_last_holder() -> None:
    pool = PagePool(3)
    taken = pool.allocate(2)
    assert sorted(taken) == [1, 2]
    assert pool.free == 1
    pool.incref(taken[0])
    assert pool.refcount(taken[0]) == 2
    pool.decref(taken[0])
    assert pool.free == 1
    pool.decref(taken[0])
    assert (pool.free, pool.refcount(taken[0])) == (2, 0)


def test_page_0_is_never_allocated() -> None:
    pool = PagePool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.allocate(0) == []


def test_allocating_more_than_free_raises() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="2 pages requested, 1 free"):
        pool.allocate(2)
    assert pool.free == 1


def test_misuse_raises() -> None:
    pool = PagePool(2)
    page, other = pool.allocate(2)
    pool.cache(page)
    with pytest.raises(RuntimeError, match="cached twice"):
        pool.cache(page)
    with pytest.raises(RuntimeError, match="is not cached"):
        pool.uncache(other)
    pool.decref(page)
    pool.decref(other)
    for free in (0, page, other):
        with pytest.raises(RuntimeError, match="released twice"):
            pool.decref(free)
    with pytest.raises(RuntimeError, match="is free"):
        pool.incref(other)
    assert pool.free == 1


def test_idle_counts_pages_held_by_the_cache_only() -> None:
    pool = PagePool(3)
    page, other, _ = pool.allocate(3)
    pool.cache(page)
    assert pool.idle == 0
    pool.decref(page)
    assert (pool.idle, pool.free) == (1, 0)
    pool.incref(page)
    assert pool.idle == 0
    pool.decref(page)
    pool.uncache(page)
    assert (pool.idle, pool.free, pool.refcount(page)) == (0, 1, 0)
    pool.cache(other)
    pool.uncache(other)
    assert (pool.idle, pool.refcount(other)) == (0, 1)
