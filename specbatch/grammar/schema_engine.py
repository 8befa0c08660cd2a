"""Which of two engines constrains an answer to a JSON schema: an automaton on the device, or llguidance on the host.

The automaton costs a step nothing, and is taken where it accepts what the schema accepts and is quick to compile. That
is decided by the schema and the vocabulary alone: work is counted, not timed, so that the machine does not matter.
"""

from __future__ import annotations

import json
import math

from specbatch.grammar.host_schema import host_grammar
from specbatch.grammar.json_schema import regex_of_schema
from specbatch.grammar.limits import RegexError, limited, remembered
from specbatch.grammar.regex_parser import checked_regex
from specbatch.grammar.schema_rewrite import SchemaError, rewritten

TRANSLATING = 150_000  # steps of the expression of a schema, see `limits.spend`


def checked_schema(schema: str) -> tuple[str | None, str]:
    """The expression for the automaton of a schema, given as JSON, or None, and the grammar for llguidance if so.
    Raises RegexError if no engine compiles it."""
    regex, grammar = json.loads(_checked(schema))
    return regex, grammar


@remembered(SchemaError)
def _checked(schema: str) -> str:
    root = json.loads(rewritten(schema).schema)
    try:
        with limited(math.inf, TRANSLATING):
            regex = regex_of_schema(root)
            checked_regex(regex)
            return json.dumps([regex, ""])
    except RegexError:
        return json.dumps([None, host_grammar(root)])


def host_grammar_of(schema: str) -> str:
    """The grammar for llguidance of a schema whose automaton is too large with a vocabulary."""
    return host_grammar(json.loads(rewritten(schema).schema))
