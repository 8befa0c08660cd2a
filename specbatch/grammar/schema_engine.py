"""Which of two engines constrains an answer to a JSON schema: an automaton on the device, or llguidance on the host.

The automaton costs a step nothing, and is taken where it accepts what the schema accepts and is quick to compile. That
is decided by the schema and the vocabulary alone: the work is counted, not timed, so that it does not depend on the
machine.
"""

from __future__ import annotations

import math

from specbatch.grammar.host_schema import host_grammar
from specbatch.grammar.json_schema import regex_of_schema
from specbatch.grammar.limits import RegexError, limited
from specbatch.grammar.regex_parser import checked_regex

TRANSLATING, COMPILING = 150_000, 600_000  # steps of the automaton of a schema, see `limits.spend`


def device_regex(schema: str) -> str | None:
    """The expression for the automaton of a schema, None for one that llguidance takes."""
    try:
        with limited(math.inf, TRANSLATING):
            found = regex_of_schema(schema)
            checked_regex(found)
    except RegexError:
        return None
    return found


def check_schema(schema: str) -> None:
    """Raises RegexError if no engine compiles a schema, which is JSON."""
    if device_regex(schema) is None:
        host_grammar(schema)
