"""Places of the tables of grammars: none overlap, those in use stay, unused ones make room."""

from __future__ import annotations

from random import Random

import numpy as np

from specbatch.grammar.token_automaton import TokenAutomaton
from specbatch.memory.grammar_pool import GrammarPool


def table(size: int) -> TokenAutomaton:
    return TokenAutomaton(np.zeros(size - 6, np.int16), np.zeros((2, 1), np.int16), np.zeros(2, np.int32))


def test_tables_in_use_never_overlap() -> None:
    random, pool = Random(0), GrammarPool(100)
    tables = [table(random.randint(10, 60)) for _ in range(12)]
    held: list[tuple[int, TokenAutomaton]] = []
    written: list[TokenAutomaton | None] = [None] * 100
    refused = 0
    for _ in range(2000):
        if held and random.random() < 0.5:
            pool.decref(held.pop(random.randrange(len(held)))[1])
            continue
        item = random.choice(tables)
        start = pool.allocate(item)
        if start is None:
            assert held
            refused += 1
            continue
        held.append((start, item))
        for place, new in pool.take_new():
            written[place : place + new.size] = [new] * new.size
        assert len(written) == 100
        for place, other in held:
            assert written[place : place + other.size] == [other] * other.size
    assert refused > 20


def test_a_table_stays_until_its_place_is_needed() -> None:
    pool, first, second, third = GrammarPool(100), table(50), table(50), table(50)
    assert (pool.allocate(first), pool.allocate(second), pool.allocate(third)) == (0, 50, None)
    assert next(pool.take_new()) == (0, first)  # and it is not written
    assert list(pool.take_new()) == [(0, first), (50, second)]
    pool.decref(second)
    pool.decref(first)
    assert (pool.allocate(second), list(pool.take_new())) == (50, [])
    assert (pool.allocate(third), list(pool.take_new())) == (0, [(0, third)])
