"""Which of two engines constrains an answer to a JSON schema: an automaton on the device, or llguidance on the host.

The automaton costs a step nothing, and is taken where it accepts what the schema accepts and is quick to compile. That
is decided by the schema and the vocabulary alone: work is counted, not timed, so that the machine does not matter.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from specbatch.grammar.host_schema import host_grammar
from specbatch.grammar.json_schema import regex_of_schema
from specbatch.grammar.limits import READING_S, RegexError, limited, remembered
from specbatch.grammar.regex_parser import checked_regex
from specbatch.grammar.schema_rewrite import Readings, SchemaError, readings

_FREE = 2  # arrays and objects in a value without a schema, in a larger expression
TRANSLATING = 150_000  # steps of the expression of a schema, see `limits.spend`


class Checked(NamedTuple):
    """What compiles a schema: the expression of its automaton, or None, and a grammar of llguidance, "" for a schema
    whose expression is enough. notes: what is ignored."""

    regex: str | None
    grammar: str
    notes: list[str]


def checked_schema(schema: str) -> Checked:
    """Of a schema, given as JSON. Raises RegexError if no engine compiles it."""
    return Checked(*json.loads(_checked(schema)))


@remembered(SchemaError)
def _checked(schema: str) -> str:
    with limited(READING_S):
        found = readings(schema)
    regex = None if found.rewritten is None else _regex(json.loads(found.rewritten))
    return json.dumps([regex, "" if regex else _grammar(found), found.notes])


def _regex(root: Any) -> str | None:
    try:
        with limited(math.inf, TRANSLATING):
            regex = regex_of_schema(root)
            checked_regex(regex)
            return regex
    except RegexError:
        return None


def _grammar(found: Readings) -> str:
    """llguidance has some of the keywords that are rewritten, and is the judge of them."""
    try:
        return host_grammar(json.loads(found.plain))
    except SchemaError:
        if found.rewritten is None:
            raise SchemaError(found.reason) from None
        return host_grammar(json.loads(found.rewritten))


def embedded_regex(schema: Any) -> str:
    """The expression for a schema as a part of a larger one, which has no other engine. Values without a schema have at
    most two arrays and objects in each other, and objects with properties have no others. Raises RegexError."""
    found = readings(json.dumps(schema))
    if found.rewritten is None:
        raise SchemaError(found.reason)
    return regex_of_schema(json.loads(found.rewritten), _FREE)


def host_grammar_of(schema: str) -> str:
    """The grammar of llguidance for a schema whose automaton is too large with a vocabulary."""
    return _grammar(readings(schema))
