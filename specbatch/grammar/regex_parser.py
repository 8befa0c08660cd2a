"""Parses regular expressions with Python's own parser, within limits of CPU time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec, module_from_spec
from typing import Any
from warnings import catch_warnings, simplefilter

from specbatch.grammar.limits import MOST_STATES, READING_S, RegexError, TooManyStatesError, limited, remembered, spend

LONGEST = 1 << 20  # characters of an expression
_SHORT = 10_000  # characters of an expression whose parts are kept
_ESCAPED_OR_SET = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
NESTED = "it is nested too deeply"
_UNSUPPORTED = {
    "ASSERT": "lookahead and lookbehind are not regular",
    "ASSERT_NOT": "lookahead and lookbehind are not regular",
    "GROUPREF": "back-references are not regular",
    "GROUPREF_EXISTS": "conditional groups are not regular",
    "AT": "^ and $ are supported at its beginning and end only, and \\b nowhere",
    "ATOMIC_GROUP": "atomic groups are not supported; use a plain group",
    "POSSESSIVE_REPEAT": "possessive repetition is not supported; use *, + or {m,n}",
}


def _limited_parser() -> Any:
    """A copy of Python's parser that counts its steps: it takes minutes for some expressions of a megabyte, as it
    removes a common prefix of alternatives item by item."""
    spec = find_spec("re._parser")
    assert spec is not None
    assert spec.loader is not None
    parser: Any = module_from_spec(spec)
    spec.loader.exec_module(parser)

    class Tokenizer(parser.Tokenizer):  # type: ignore[misc]
        def _Tokenizer__next(self) -> None:
            spend()
            super()._Tokenizer__next()

    class SubPattern(parser.SubPattern):  # type: ignore[misc]
        def __delitem__(self, index: int) -> None:
            spend(1 + len(self.data) // 8000)  # which are moved
            super().__delitem__(index)

    parser.Tokenizer, parser.SubPattern = Tokenizer, SubPattern
    return parser


_parser = _limited_parser()
MAXREPEAT = _parser.MAXREPEAT


@remembered(RegexError)
def checked_regex(pattern: str) -> str:
    """An expression that can be parsed within the time for it. Raises RegexError for another one."""
    if len(pattern) > LONGEST:
        raise RegexError(f"it has {len(pattern)} characters; use at most {LONGEST}")
    with limited(READING_S):
        parse_regex(pattern)
    return ""


def parse_regex(pattern: str) -> tuple[Any, ...]:
    """The parsed expression. Raises RegexError for one that is no regular expression, or needs more than a finite
    automaton."""
    return _parsed_short(pattern) if len(pattern) <= _SHORT else _parsed(pattern)


def _parsed(pattern: str) -> tuple[Any, ...]:
    try:
        with catch_warnings():
            simplefilter("ignore", FutureWarning)  # for what may get another meaning, such as [[a]
            parsed = _parser.parse(without_anchors(pattern))
        _check(parsed)
        shortest = parsed.getwidth()[0]
    except (re.error, OverflowError, RecursionError) as error:
        raise RegexError(f"it cannot be parsed ({error})") from None
    if parsed.state.flags & ~re.UNICODE:
        raise RegexError("flags such as (?i) are not supported; write both cases, such as [aA]")
    if shortest >= MOST_STATES:  # each byte of a match leads to another state
        raise TooManyStatesError
    return tuple(parsed)


_parsed_short = lru_cache(64)(_parsed)


def without_anchors(pattern: str) -> str:
    """An expression without ^ at its beginning and $ at its end, which change nothing as whole texts are matched."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return pattern if escaped else body


def matches_whole_text(pattern: str) -> bool:
    """Whether ^ and $ make an expression match whole texts only where it is searched for. A | that is in no group
    divides them."""
    if not pattern.startswith("^") or without_anchors(pattern) == pattern.removeprefix("^"):
        return False
    rest = _ESCAPED_OR_SET.sub("", pattern)
    depth = 0
    for letter in rest:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "|" and not depth:
            return False
    return True


def match_lengths(pattern: str) -> tuple[int, int]:
    """Bounds of the number of characters of matches. Raises RegexError."""
    parsed = list(parse_regex(pattern))
    try:
        shortest, longest = _parser.SubPattern(_parser.State(), parsed).getwidth()
    except RecursionError:
        raise RegexError(NESTED) from None
    return int(shortest), int(longest)


def _check(items: Iterable[Any]) -> None:
    for op, argument in items:
        spend()
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
