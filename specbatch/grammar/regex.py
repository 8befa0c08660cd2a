"""Compiles regular expressions into deterministic finite automata over the bytes of UTF-8.

Thompson's construction and the subset construction (Hopcroft, Motwani and Ullman, chapters 2 and 3) make the automaton,
within limits of its size and of CPU time. Expressions match whole texts, and `\\d`, `\\w` and `\\s` mean ASCII
characters, as in the patterns of JSON Schema. Where spaces are excluded, as by `\\S`, they are those of Unicode, so
that Python and ECMAScript accept a match, too.

outlines-core 0.2.14 makes the automaton of a search in a longer text as well, which has exponentially many states for
`"[^"]{0,30}"` with escapes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from specbatch.grammar.limits import COMPILING_S, MOST_STATES, RegexError, TooManyStatesError, limited, spend
from specbatch.grammar.regex_parser import MAXREPEAT, NESTED, parse_regex

_MOST_NFA_STATES = 200_000
_MOST_STEPS = 1_000_000  # of a nondeterministic automaton: about 100 MiB
_MOST_WORK = 4_000_000  # states in all sets of the subset construction: 16 MiB
_TOO_MUCH = "it takes too much work to compile: repeat less, or use fewer optional parts"
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Range = tuple[int, int]
_CATEGORIES: dict[str, list[Range]] = {
    "CATEGORY_DIGIT": [(48, 57)],
    "CATEGORY_WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "CATEGORY_SPACE": [(9, 13), (32, 32)],
}
# All spaces of Python and ECMAScript.
_EXCLUDED: dict[str, list[Range]] = {
    "CATEGORY_SPACE": [
        (9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
        (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ],
}  # fmt: skip


class ByteAutomaton(NamedTuple):
    """State 0 is the first.

    table      int32 [S, 256]: the state after each byte, -1 where there is none
    accepting  bool [S]: a text may end in this state
    """

    table: np.ndarray
    accepting: np.ndarray


def compile_regex(pattern: str) -> ByteAutomaton:
    """The automaton of an expression. Raises RegexError, also for one that is too large."""
    with limited(COMPILING_S):
        nfa = _Nfa()
        first = nfa.state()
        try:
            last = nfa.add(parse_regex(pattern), first)
        except RecursionError:
            raise RegexError(NESTED) from None
        return _determinize(nfa, first, last)


class _Nfa:
    """A nondeterministic automaton: empty steps, and steps (first byte, last byte, state), of each state."""

    def __init__(self) -> None:
        self.empty: list[list[int]] = []
        self.steps: list[list[tuple[int, int, int]]] = []
        self._count = 0  # of steps

    def state(self) -> int:
        if len(self.empty) >= _MOST_NFA_STATES or self._count > _MOST_STEPS:
            raise RegexError("it is too large: repeat or nest less")
        self.empty.append([])
        self.steps.append([])
        return len(self.empty) - 1

    def add(self, items: Collection[Any], state: int) -> int:
        """Add the states that match `items` after `state`, which gets no steps into it. Returns the last one."""
        spend(4 * len(items))
        for op, argument in items:
            name = str(op)
            if name == "SUBPATTERN":
                state = self.add(argument[3], state)
            elif name in ("MAX_REPEAT", "MIN_REPEAT"):
                least, most, inner = argument
                state = self._repeat(least, most, inner, state)
            elif name == "BRANCH":
                out = self.state()
                for inner in argument[1]:
                    self.empty[self.add(inner, state)].append(out)
                state = out
            else:
                state = self._character(_ranges_of(name, argument), state)
        return state

    def _repeat(self, least: int, most: Any, inner: Any, state: int) -> int:
        for _ in range(least):
            states = len(self.empty)
            state = self.add(inner, state)
            if len(self.empty) == states:  # it matches the empty text only, however often it is repeated
                return state
        out = self.state()
        if most is MAXREPEAT:
            self.empty[state].append(out)
            self.empty[self.add(inner, out)].append(out)
            return out
        for _ in range(most - least):
            states = len(self.empty)
            self.empty[state].append(out)
            state = self.add(inner, state)
            if len(self.empty) == states:
                break
        self.empty[state].append(out)
        return out

    def _character(self, ranges: list[Range], state: int) -> int:
        out = self.state()
        ends: dict[tuple[Range, ...], int] = {(): out}  # states by the bytes that lead from them to `out`
        for first, last in ranges:
            spend(10)
            for path in _utf8(first, last):
                self._count += len(path)
                for place in range(len(path) - 1, 0, -1):
                    rest = tuple(path[place:])
                    if rest not in ends:
                        ends[rest] = self.state()
                        self.steps[ends[rest]].append((*rest[0], ends[rest[1:]]))
                self.steps[state].append((*path[0], ends[tuple(path[1:])]))
        return out


def _ranges_of(name: str, argument: Any, negated: bool = False) -> list[Range]:
    """The code points of one character of an expression. negated: all others are meant."""
    if name == "LITERAL":
        return _united([(argument, argument)])
    if name == "NOT_LITERAL":
        return _others([(argument, argument)])
    if name == "ANY":
        return _others([(10, 10)])
    if name == "IN":
        excludes = str(argument[0][0]) == "NEGATE"
        spend(4 * len(argument))
        ranges = [found for op, value in argument[excludes:] for found in _ranges_of(str(op), value, excludes)]
        return _others(ranges) if excludes else _united(ranges)
    if name == "RANGE":
        return [argument]
    if name == "CATEGORY":
        kind, others = str(argument).replace("_NOT", ""), "_NOT" in str(argument)
        ranges = _EXCLUDED.get(kind, _CATEGORIES[kind]) if others != negated else _CATEGORIES[kind]
        return _others(ranges) if others else ranges
    raise RegexError(f"{name.lower().replace('_', ' ')} is not supported")


def _united(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, without overlaps."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _others(ranges: Iterable[Range]) -> list[Range]:
    """All code points but these."""
    found, start = [], 0
    for first, last in _united(ranges):
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    return [*found, (start, _LAST)] if start <= _LAST else found


@lru_cache(4096)
def _utf8(first: int, last: int) -> list[list[Range]]:
    """The UTF-8 of a range of code points: sequences of byte ranges."""
    low, high = _SURROGATES
    if first <= high and last >= low:
        parts = [(first, low - 1), (high + 1, last)]
        return [path for a, b in parts if a <= b for path in _utf8(a, b)]
    paths: list[list[Range]] = []
    for least, most in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, _LAST)):
        a, b = max(first, least), min(last, most)
        if a <= b:
            paths += _byte_ranges(chr(a).encode(), chr(b).encode())
    return paths


def _byte_ranges(first: bytes, last: bytes) -> Iterator[list[Range]]:
    """Byte ranges that together are the encodings of one length from `first` to `last`."""
    a, b, more = first[0], last[0], len(first) - 1
    if not more or a == b:
        if not more:
            yield [(a, b)]
        else:
            yield from ([(a, a), *rest] for rest in _byte_ranges(first[1:], last[1:]))
        return
    lowest, highest = b"\x80" * more, b"\xbf" * more
    if first[1:] != lowest:
        yield from ([(a, a), *rest] for rest in _byte_ranges(first[1:], highest))
        a += 1
    if last[1:] != highest:
        yield from ([(b, b), *rest] for rest in _byte_ranges(lowest, last[1:]))
        b -= 1
    if a <= b:
        yield [(a, b), *[(0x80, 0xBF)] * more]


class _Moves:
    """The steps of a nondeterministic automaton by classes of bytes. No step distinguishes the bytes of a class.

    class_of  int64 [256]
    classes   of each set of bytes that leads somewhere
    of        for each state, the number of a set and a state that its bytes lead to
    """

    def __init__(self, nfa: _Nfa) -> None:
        numbers: dict[int, int] = {}  # sets of bytes, as bits
        self.of: list[list[tuple[int, int]]] = []
        for steps in nfa.steps:
            bits: dict[int, int] = {}
            spend(1 + len(steps))
            for low, high, target in steps:
                if not nfa.steps[target] and len(nfa.empty[target]) == 1:  # as after an optional part
                    (target,) = nfa.empty[target]
                bits[target] = bits.get(target, 0) | (2 << high) - (1 << low)
            self.of.append([(numbers.setdefault(one, len(numbers)), target) for target, one in bits.items()])
        packed = b"".join(one.to_bytes(32, "little") for one in numbers)
        has = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(-1, 32), axis=1, bitorder="little")
        columns: dict[bytes, int] = {}
        self.class_of = np.array([columns.setdefault(has[:, byte].tobytes(), len(columns)) for byte in range(256)])
        firsts = np.unique(self.class_of, return_index=True)[1].tolist()
        self.count = len(firsts)
        self.classes = [[place for place, byte in enumerate(firsts) if one >> byte & 1] for one in numbers]


def _closures(nfa: _Nfa) -> list[tuple[int, ...]]:
    """For each state the states that it reaches without a byte, itself included."""
    found: list[tuple[int, ...]] = [()] * len(nfa.empty)
    work = 0
    for state in reversed(range(len(found))):  # most steps without a byte lead to later states
        reached, left = {state}, [state]
        while left:
            for other in nfa.empty[left.pop()]:
                if other not in reached:
                    if other > state:
                        reached.update(found[other])
                    else:
                        reached.add(other)
                        left.append(other)
        found[state] = tuple(reached)
        spend(2 + len(reached) // 10)
        work += len(reached)
        if work > _MOST_WORK:
            raise RegexError(_TOO_MUCH)
    return found


def _determinize(nfa: _Nfa, first: int, last: int) -> ByteAutomaton:
    """The subset construction. Sets of states are kept as sorted int32."""
    moves = _Moves(nfa)
    closures = _closures(nfa)
    counts = [state == last or bool(found) for state, found in enumerate(moves.of)]
    work = 0
    indices: dict[bytes, int] = {}
    sets: list[bytes] = []

    def index_of(states: Collection[int]) -> int:
        nonlocal work
        closed = set[int]()
        for state in sorted(states):
            if state not in closed:  # else what it reaches is there, too
                closed.update(closures[state])
        spend(len(states) + len(closed) // 4)
        found = array("i", sorted([state for state in closed if counts[state]])).tobytes()
        if found not in indices:
            work += len(closed)
            indices[found] = len(sets)
            sets.append(found)
        if len(sets) > MOST_STATES:
            raise TooManyStatesError
        if work > _MOST_WORK:
            raise RegexError(_TOO_MUCH)
        return indices[found]

    index_of([first])
    rows: list[list[int]] = []
    for states in sets:  # grows
        reached: dict[int, set[int]] = {}  # by the number of the set of bytes
        spend(len(states) // 4)
        for state in array("i", states):
            for number, target in moves.of[state]:
                if number in reached:
                    reached[number].add(target)
                else:
                    reached[number] = {target}
        leading: list[list[int]] = [[] for _ in range(moves.count)]  # sets of bytes with each class
        for number in reached:
            spend(len(moves.classes[number]))
            for place in moves.classes[number]:
                leading[place].append(number)
        after: dict[tuple[int, ...], int] = {(): -1}
        for numbers in set(map(tuple, leading)) - after.keys():
            after[numbers] = index_of(set[int]().union(*[reached[number] for number in numbers]))
        rows.append([after[tuple(numbers)] for numbers in leading])
    table = np.array(rows, dtype=np.int32)[:, moves.class_of]
    accepting = [last in array("i", states) for states in sets]
    return ByteAutomaton(table, np.array(accepting))
