"""Grammars of llguidance for JSON schemas."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any

from llguidance import LLMatcher

from specbatch.config.settings import is_number
from specbatch.grammar.limits import spend
from specbatch.grammar.schema_rewrite import SchemaError

# One space at most, as the automata allow: a model that may write any number of them can go on forever.
_OPTIONS: Any = {"whitespace_pattern": "[ ]?", "coerce_one_of": False, "lenient": False}
# Else one tokenization alone would be allowed where the text is forced: the model decides which tokens it consists of.
_PLACE, _QUOTED = "at 2(8): failed to compile JSON schema: ", re.compile(r" 1 \| %llguidance")
_NEAR, _LARGE = 1e-9, 1e6
_MOST = 1 << 62  # llguidance 1.9.1 does not survive some integers of 64 bits
_LARK = '%%llguidance {"no_forcing": true}\nstart: %%json %s'


def host_grammar(root: Any) -> str:
    """The grammar for a schema as `schema_rewrite` leaves it. Raises SchemaError if llguidance cannot compile it."""
    root = {} if root is True else root
    if root is False:
        raise SchemaError("it accepts nothing")
    grammar = LLMatcher.grammar_from_lark(_LARK % json.dumps(_mended(root) | {"x-guidance": _OPTIONS}))
    is_wrong, reasons = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        # Its place in the grammar, the reason, and the grammar.
        reason = _QUOTED.split(" ".join(reasons[0].split()))[0].removeprefix(_PLACE)
        raise SchemaError(f"llguidance {version('llguidance')} cannot compile it: {reason}")
    return grammar


def _mended(value: Any) -> Any:
    """A schema without what llguidance 1.9.1 has wrong. It accepts the bound itself where an exclusive one is whole and
    the other bound is less than 1 away (`findings/llguidance-exclusive-bounds.sh`): next to an exclusive bound, numbers
    less than 1e-9 away from it are left out, too."""
    spend()
    if isinstance(value, list):
        return [_mended(each) for each in value]
    if not isinstance(value, dict):
        if isinstance(value, int) and abs(value) > _MOST:
            raise SchemaError(f"it has an integer of {value.bit_length()} bits; use integers from -2^62 to 2^62")
        return value
    found = {key: each if key in ("const", "enum") and _check(each) else _mended(each) for key, each in value.items()}
    for open_bound, closed, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound, others = found.get(open_bound), [found[closed]] if is_number(found.get(closed)) else []
        if bound is True:  # of draft 4
            bound, others = found.get(closed), []
        if isinstance(bound, int | float) and is_number(bound) and bound == int(bound) and abs(bound) < _LARGE:
            del found[open_bound]
            found[closed] = (max if sign > 0 else min)([bound + sign * _NEAR, *others])
    return found


def _check(value: Any) -> bool:
    """Refuse values that llguidance cannot take; True for others."""
    _mended({"": value} if isinstance(value, dict) else value)
    return True
