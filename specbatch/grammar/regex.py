"""Compiles regular expressions into deterministic finite automata over the bytes of UTF-8.

Python's own parser reads the expression; Thompson's construction and the subset construction (Hopcroft, Motwani and
Ullman, chapters 2 and 3) make the automaton, within limits of its size and of the work. Expressions match whole texts,
and `\\d`, `\\w` and `\\s` mean ASCII characters, as in the patterns of JSON Schema. Where spaces are excluded, as by
`\\S`, they are those of Unicode, so that Python and ECMAScript accept a match, too.

outlines-core 0.2.14 makes the automaton of a search in a longer text as well, which has exponentially many states for
`"[^"]{0,30}"` with escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np

MOST_STATES = 16_000  # of an automaton
_MOST_NFA_STATES = 200_000
_MOST_WORK = 4_000_000  # states in all sets of the subset construction: about 5 seconds
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_parser: Any = import_module("re._parser")

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
_UNSUPPORTED = {
    "ASSERT": "lookahead and lookbehind are not regular",
    "ASSERT_NOT": "lookahead and lookbehind are not regular",
    "GROUPREF": "back-references are not regular",
    "GROUPREF_EXISTS": "conditional groups are not regular",
    "AT": "^ and $ are supported at its beginning and end only, and \\b nowhere",
    "ATOMIC_GROUP": "atomic groups are not supported; use a plain group",
    "POSSESSIVE_REPEAT": "possessive repetition is not supported; use *, + or {m,n}",
}


class RegexError(ValueError):
    """Why an expression cannot be compiled."""


class ByteAutomaton(NamedTuple):
    """State 0 is the first.

    table      int32 [S, 256]: the state after each byte, -1 where there is none
    accepting  bool [S]: a text may end in this state
    """

    table: np.ndarray
    accepting: np.ndarray


@lru_cache(1024)
def parse_regex(pattern: str) -> tuple[Any, ...]:
    """The parsed expression. Raises RegexError for one that is no regular expression, or needs more than a finite
    automaton."""
    try:
        with catch_warnings():
            simplefilter("ignore", FutureWarning)  # for what may get another meaning, such as [[a]
            parsed = _parser.parse(without_anchors(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise RegexError(f"it cannot be parsed ({error})") from None
    if parsed.state.flags & ~re.UNICODE:
        raise RegexError("flags such as (?i) are not supported; write both cases, such as [aA]")
    _check(parsed)
    return tuple(parsed)


def without_anchors(pattern: str) -> str:
    """An expression without ^ at its beginning and $ at its end, which change nothing as whole texts are matched."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return pattern if escaped else body


def match_lengths(pattern: str) -> tuple[int, int]:
    """Bounds of the number of characters of matches. Raises RegexError."""
    shortest, longest = _parser.SubPattern(_parser.State(), list(parse_regex(pattern))).getwidth()
    return int(shortest), int(longest)


def compile_regex(pattern: str) -> ByteAutomaton:
    """The automaton of an expression. Raises RegexError, also for one that is too large."""
    nfa = _Nfa()
    first = nfa.state()
    last = nfa.add(parse_regex(pattern), first)
    return _determinize(nfa, first, last)


def _check(items: Iterable[Any]) -> None:
    for op, argument in items:
        if reason := _UNSUPPORTED.get(str(op)):
            raise RegexError(reason)
        if str(op) == "SUBPATTERN":
            _, add, drop, inner = argument
            if add or drop:
                raise RegexError("flags such as (?i:...) are not supported; write both cases, such as [aA]")
            _check(inner)
        elif str(op) in ("MAX_REPEAT", "MIN_REPEAT"):
            _check(argument[2])
        elif str(op) == "BRANCH":
            for inner in argument[1]:
                _check(inner)


class _Nfa:
    """A nondeterministic automaton: empty steps, and steps (first byte, last byte, state), of each state."""

    def __init__(self) -> None:
        self.empty: list[list[int]] = []
        self.steps: list[list[tuple[int, int, int]]] = []

    def state(self) -> int:
        if len(self.empty) >= _MOST_NFA_STATES:
            raise RegexError("it is too large: repeat or nest less")
        self.empty.append([])
        self.steps.append([])
        return len(self.empty) - 1

    def add(self, items: Iterable[Any], state: int) -> int:
        """Add the states that match `items` after `state`, which gets no steps into it. Returns the last one."""
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
        if most is _parser.MAXREPEAT:
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
            for path in _utf8(first, last):
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


@cache
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


def _determinize(nfa: _Nfa, first: int, last: int) -> ByteAutomaton:
    """The subset construction. Bytes between which no step differs are one class."""
    cuts = sorted({0, *(cut for steps in nfa.steps for low, high, _ in steps for cut in (low, high + 1))} - {256})
    class_of = np.searchsorted(np.array(cuts), np.arange(256), side="right") - 1
    classes = class_of.tolist()
    work = 0
    indices: dict[frozenset[int], int] = {}
    sets: list[frozenset[int]] = []

    def index_of(states: frozenset[int]) -> int:
        nonlocal work
        closed, left = set(states), list(states)
        while left:
            for state in nfa.empty[left.pop()]:
                if state not in closed:
                    closed.add(state)
                    left.append(state)
        work += len(closed)
        found = frozenset(state for state in closed if nfa.steps[state] or state == last)
        if found not in indices:
            indices[found] = len(sets)
            sets.append(found)
        if len(sets) > MOST_STATES:
            raise RegexError(f"its automaton has more than {MOST_STATES} states: repeat less, or match less in between")
        if work > _MOST_WORK:
            raise RegexError("it takes too much work to compile: repeat less, or use fewer optional parts")
        return indices[found]

    index_of(frozenset([first]))
    closures: dict[frozenset[int], int] = {}
    rows: list[list[int]] = []
    for states in sets:  # grows
        spans: dict[Range, set[int]] = {}
        for state in states:
            for low, high, target in nfa.steps[state]:
                spans.setdefault((low, high), set()).add(target)
        targets: list[set[int]] = [set() for _ in cuts]
        for (low, high), reached in spans.items():
            for place in range(classes[low], classes[high] + 1):
                targets[place] |= reached
        row = []
        for found in map(frozenset, targets):
            if found and found not in closures:
                closures[found] = index_of(found)
            row.append(closures[found] if found else -1)
        rows.append(row)
    table = np.array(rows, dtype=np.int32)[:, class_of]
    return ByteAutomaton(table, np.array([last in states for states in sets]))
