"""Grammars of llguidance for JSON schemas."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any

from llguidance import LLMatcher

from specbatch.grammar.limits import spend
from specbatch.grammar.schema_rewrite import SchemaError

# One space at most, as the automata allow: a model that may write any number of them can go on forever.
_OPTIONS: Any = {"whitespace_pattern": "[ ]?", "coerce_one_of": False, "lenient": False}
# Else one tokenization alone would be allowed where the text is forced: the model decides which tokens it consists of.
_PLACE, _QUOTED = "at 2(8): failed to compile JSON schema: ", re.compile(r" 1 \| %llguidance")
_MOST = 1 << 62  # llguidance 1.9.1 does not survive some integers of 64 bits
_LARK = '%%llguidance {"no_forcing": true}\nstart: %%json %s'


def host_grammar(root: Any) -> str:
    """The grammar for a schema as `schema_rewrite` leaves it. Raises SchemaError if llguidance cannot compile it."""
    root = {} if root is True else root
    if root is False:
        raise SchemaError("it accepts nothing")
    _check_integers(root)
    grammar = LLMatcher.grammar_from_lark(_LARK % json.dumps(root | {"x-guidance": _OPTIONS}))
    is_wrong, reasons = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        # Its place in the grammar, the reason, and the grammar.
        reason = _QUOTED.split(" ".join(reasons[0].split()))[0].removeprefix(_PLACE)
        raise SchemaError(f"llguidance {version('llguidance')} cannot compile it: {reason}")
    return grammar


def _check_integers(root: Any) -> None:
    waiting = [root]
    while waiting:
        value = waiting.pop()
        spend()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and abs(value) > _MOST:
            raise SchemaError(f"it has an integer of {value.bit_length()} bits; use integers from -2^62 to 2^62")
