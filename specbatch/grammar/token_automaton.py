"""Finite automata over tokens: which tokens may follow, and the state after each of them.

A token takes every state of an automaton over bytes to another one, or to none. Tokens that do the same in all states
share a class, so that a table has one column per class and not one per token. The functions of prefixes are composed
byte by byte, each pair of a function and a byte once, so that the time hardly depends on the size of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from specbatch.grammar.limits import RegexError, spend
from specbatch.grammar.regex import ByteAutomaton

FREE = -1  # the state of a request that nothing constrains
FORCED_CELLS = 2  # int16, at the end of each row: the bits of the token that is forced, or -1
_MOST = 2**15 - 1  # states or classes that an int16 holds
MOST_CELLS = 1 << 26  # int16, of all functions: 128 MiB
_CELLS_OF_A_STEP = 500  # that NumPy handles in the time of `limits.spend(1)`
_FEW = 64  # tokens that may follow where one is forced, at most


class TokenAutomaton:
    """State 0 is the first, and the last one is after an end token, where anything may follow. Every other state leads
    to an end token.

    classes    int16 [V]: of each token
    next       int16 [S, C]: the state after a token of each class, -1 where it may not follow
    forced     int32 [S]: where all tokens that may follow are beginnings of one of them, that one, else -1. Its text
               follows in any case, though maybe as other tokens
    """

    def __init__(self, classes: np.ndarray, next: np.ndarray, forced: np.ndarray) -> None:
        self.classes = classes
        self.next = next
        self.forced = forced

    @property
    def cells(self) -> np.ndarray:
        """int16 [V + S * (C + FORCED_CELLS)]: classes, then a row of each state."""
        forced = self.forced.astype("<i4").view("<i2").reshape(-1, FORCED_CELLS)
        return np.concatenate([self.classes, np.hstack([self.next, forced]).ravel()])

    @property
    def row(self) -> int:
        """Number of cells of a state."""
        return int(self.next.shape[1]) + FORCED_CELLS

    @property
    def size(self) -> int:
        """Number of cells."""
        return int(self.classes.size) + len(self.next) * self.row

    def after(self, tokens: Iterable[int]) -> int:
        """The state after tokens, `FREE` after one that may not follow."""
        state = 0
        for token in tokens:
            state = int(self.next[state, self.classes[token]])
            if state < 0:
                return FREE
        return state

    def allowed(self, state: int) -> list[int]:
        """Tokens that may follow."""
        found: list[int] = np.flatnonzero(self.next[state, self.classes] >= 0).tolist()
        return found


def compile_tokens(
    automaton: ByteAutomaton, tokens: Sequence[bytes | None], ends: Collection[int], vocabulary: int
) -> TokenAutomaton:
    """The automaton over the tokens of a vocabulary.

    tokens      the bytes of each token; None for those that may not be part of a text
    ends        end tokens, which are allowed where the text may end
    vocabulary  number of ids; those after `tokens` never follow

    Raises RegexError if no sequence of these tokens is a match.
    """
    states = len(automaton.table)
    # Two more states: after an end token, and none at all, which every byte leads to itself.
    end, none = states, states + 1
    table = np.full((states + 2, 256), none, dtype=np.int16)
    table[:states] = np.where(automaton.table < 0, none, automaton.table)
    table[end] = end
    texts = np.array([i for i, text in enumerate(tokens[:vocabulary]) if text and i not in ends], dtype=np.int64)
    functions = _Functions(table)
    found = np.zeros(vocabulary, dtype=np.int64)
    found[:] = functions.index(np.full(states + 2, none, dtype=np.int16))
    found[texts] = functions.of([tokens[i] or b"" for i in texts])
    ending = np.full(states + 2, none, dtype=np.int16)
    ending[:states][automaton.accepting] = end
    ending[end] = end
    found[list(ends)] = functions.index(ending)
    used, classes = np.unique(found, return_inverse=True)
    next = functions.stacked(used)[:, : states + 1].T
    next[next == none] = -1
    next[end] = end
    classes, next = _without_dead_ends(classes, next, end)
    inner = dict(zip(texts.tolist(), (tokens[i] or b"" for i in texts), strict=True))
    return TokenAutomaton(classes, next, _forced(classes, next, inner))


class _Functions:
    """Functions from states to states, each once: those of sequences of bytes."""

    def __init__(self, table: np.ndarray) -> None:
        self._table = table
        self._indices: dict[bytes, int] = {}
        self._known: list[np.ndarray] = []

    def index(self, function: np.ndarray) -> int:
        """The number of a function int16 [S]."""
        spend(4 + function.size // _CELLS_OF_A_STEP)
        key = function.tobytes()
        if key not in self._indices:
            if (len(self._known) + 1) * function.size > MOST_CELLS:
                raise RegexError("it takes too much work with this vocabulary: repeat less, or match less in between")
            self._indices[key] = len(self._known)
            self._known.append(np.frombuffer(key, dtype=np.int16))  # the same memory
        return self._indices[key]

    def stacked(self, indices: np.ndarray) -> np.ndarray:
        """Functions by number: int16 [n, S]."""
        return np.stack([self._known[index] for index in indices.tolist()])

    def of(self, texts: list[bytes]) -> np.ndarray:
        """The number of the function of each text: int64 [n]."""
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        found = np.full(len(texts), self.index(np.arange(len(self._table), dtype=np.int16)))
        order = np.argsort(-lengths, kind="stable")
        joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
        starts = np.cumsum(lengths) - lengths
        for place in range(int(lengths.max(initial=0))):
            longer = order[: int(np.count_nonzero(lengths > place))]
            pairs, inverse = np.unique(found[longer] * 256 + joined[starts[longer] + place], return_inverse=True)
            numbers = [self.index(self._table[self._known[pair >> 8], pair & 255]) for pair in pairs.tolist()]
            found[longer] = np.array(numbers, dtype=np.int64)[inverse]
        return found


def _without_dead_ends(classes: np.ndarray, next: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes and transitions of the same automaton without states that lead to no end, or that nothing leads to."""
    after = []
    for row in next:
        spend(10 + 20 * row.size // _CELLS_OF_A_STEP)
        after.append(np.unique(row[row >= 0]).tolist())
    before: list[list[int]] = [[] for _ in after]
    for state, others in enumerate(after):
        spend(len(others))
        for other in others:
            before[other].append(state)
    live = _reached(end, before)
    if 0 not in live:
        raise RegexError("no sequence of the tokens of this vocabulary matches it")
    kept = sorted((_reached(0, [[x for x in others if x in live] for others in after]) | {end}) & live)
    if len(kept) > _MOST:
        raise RegexError(f"its automaton has {len(kept)} states; simplify it to at most {_MOST}")
    renamed = np.full(len(next) + 1, -1, dtype=np.int16)  # the last one is that of -1
    renamed[kept] = np.arange(len(kept))
    columns = np.ascontiguousarray(renamed[next[kept]].T)
    numbers: dict[bytes, int] = {}
    merged = np.array([numbers.setdefault(column.tobytes(), len(numbers)) for column in columns])
    if len(numbers) > _MOST:
        raise RegexError(f"its automaton has {len(numbers)} classes of tokens; simplify it to at most {_MOST}")
    firsts = np.unique(merged, return_index=True)[1]
    return merged[classes].astype(np.int16), np.ascontiguousarray(columns[firsts].T)


def _forced(classes: np.ndarray, next: np.ndarray, texts: Mapping[int, bytes]) -> np.ndarray:
    """`TokenAutomaton.forced`. texts: of all tokens that are no ends."""
    found = np.full(len(next), -1, dtype=np.int32)
    members = np.split(
        np.argsort(classes, kind="stable"), np.cumsum(np.bincount(classes, minlength=next.shape[1]))[:-1]
    )
    for state in np.flatnonzero(np.count_nonzero(next >= 0, axis=1) <= _FEW).tolist():
        spend(20 + next.shape[1] // _CELLS_OF_A_STEP)
        kinds = np.flatnonzero(next[state] >= 0).tolist()
        if sum(len(members[kind]) for kind in kinds) > _FEW:
            continue
        forced = longest([token for kind in kinds for token in members[kind].tolist()], texts)
        if forced is not None:
            found[state] = forced
    return found


def longest(tokens: Sequence[int], texts: Mapping[int, bytes]) -> int | None:
    """The token that all these are beginnings of; None if there is no such one, or too many of them. texts: of tokens
    that are no ends."""
    if not 0 < len(tokens) <= _FEW:
        return None
    found = max(tokens, key=lambda token: len(texts.get(token, b"")))
    is_forced = all(token in texts and texts[found].startswith(texts[token]) for token in tokens)
    return found if is_forced else None


def _reached(first: int, steps: list[list[int]]) -> set[int]:
    found, left = {first}, deque([first])
    while left:
        others = steps[left.popleft()]
        spend(len(others))
        for state in others:
            if state not in found:
                found.add(state)
                left.append(state)
    return found
