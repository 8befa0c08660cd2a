"""Limits of grammars: CPU time for expressions and schemas of any shape, and outcomes that are kept."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from watched_calls import Watch

from specbatch import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.grammar import limits, regex_parser, schema_rewrite
from specbatch.grammar.limits import KeptTexts, RegexError, TooMuchWorkError, limited, remembered, spend
from specbatch.grammar.regex import compile_regex
from specbatch.grammar.schema_engine import checked_schema

NAMES = [f"p{place}" for place in range(20_000)]
SETS = "".join(f"\\x{code:02x}" for code in range(1, 128, 2))
LIMIT_S = 0.05


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small part of the usual time, so that what ignores it is seen soon."""
    for limit in ("limits.READING_S", "regex_parser.READING_S", "regex.COMPILING_S", "schema_engine.READING_S"):
        monkeypatch.setattr(f"specbatch.grammar.{limit}", LIMIT_S)


def objects(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "boolean"} for name in NAMES[:count]}, **more}


EXPRESSIONS = {
    "alternatives with the same beginning": "a" * 300_000 + "|" + "a" * 300_000,
    "short alternatives with the same beginning": "|".join(["a" * 4000] * 250),
    "optional letters": "a?" * 500_000,
    "optional sets": f"(?:[{SETS}]?){{3000}}",
    "optional alternatives": "(?:a|b)?" * 100_000,
    "many alternatives": "|".join(map(str, range(150_000))),
    "a large set": "[" + "".join(map(chr, range(0x10000, 0xA27C0, 2))) + "]",
    "a large set, repeated": "(?:[" + "".join(map(chr, range(0x10000, 0x40D40, 2))) + "]){10}",
    "different sets": "(?:" + "|".join(f"[{chr(0x4E00 + n)}-{chr(0x9000 + n)}]x" for n in range(5000)) + ")*",
    "overlapping repetitions": "(?:[a-m]|[g-z]|[c-t]){0,3000}.*(?:ab|ba){0,500}",
    "empty alternatives": "(?:a|){1000}" * 50,
    "stars": "".join(f"{letter}*" for letter in "abcdefghij") * 10_000,
    "groups": "(?:" * 200 + "a" + "){0,9}" * 200,
    "nested": "(" * 400_000 + "a" + ")" * 400_000,
    "letters": "a" * 1_000_000,
}
PATTERNS = {f"p{n}": {"type": "string", "pattern": f"^(?:[a-z]?){{{500 + n}}}$"} for n in range(400)}
PAIRS = {f"a{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(30)}
SCHEMAS: dict[str, Any] = {
    "required properties": objects(20_000, required=NAMES),
    "optional properties": objects(20_000),
    "allOf of objects": {"allOf": [{"type": "object", "properties": {name: {}}} for name in NAMES[:5000]]},
    "allOf of limited objects": {"allOf": [objects(300, additionalProperties={"type": "boolean"})] * 60},
    "anyOf of objects": {"anyOf": [objects(1, required=["p0"], title=name) for name in NAMES[:5000]]},
    "oneOf": {"oneOf": [{"const": name} for name in NAMES[:3000]]},
    "enum": {"enum": NAMES * 2},
    "allOf of enums": {"allOf": [{"enum": list(range(20_000))}] * 8},
    "types": {"type": ["null", "boolean"] * 20_000, "enum": [None] * 50_000},
    "required names": objects(1, required=["p0"] * 100_000),
    "patterns": {"type": "object", "properties": PATTERNS},
    "references": {"$defs": PAIRS | {"a30": {}}, "$ref": "#/$defs/a0"},
    "numbers": {"type": "array", "prefixItems": [{"type": "number", "minimum": n + 0.123} for n in range(10_000)]},
}


def seconds(**grammar: Any) -> float:
    """CPU time of this thread to compile or refuse it."""
    start = time.thread_time()
    try:
        found = SamplingParams(**grammar)
        if (regex := found.regex or checked_schema(found.json_schema).regex) is not None:
            compile_regex(regex)
    except (SpecbatchError, RegexError):
        pass
    return time.thread_time() - start


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_time_of_expressions_is_limited(name: str) -> None:
    assert seconds(regex=EXPRESSIONS[name]) < 2 * LIMIT_S + 1.5


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", SCHEMAS)
def test_time_of_schemas_is_limited(name: str) -> None:
    assert seconds(json_schema=SCHEMAS[name]) < 2 * LIMIT_S + 1.5


def test_time_of_a_thread_is_limited() -> None:
    spend(10**9)  # without a limit
    with limited(0.05):
        time.sleep(0.1)
        spend(10**9)  # waiting does not count
    with limited(0.05), limited(100):  # the outer one holds
        deadline = time.thread_time() + 0.06
        while time.thread_time() < deadline:
            pass
        with pytest.raises(RegexError, match=r"it takes more than 0.05 seconds of CPU time"):
            spend(10**9)


@pytest.mark.parametrize(("name", "value"), [("regex", "a" * (2**20 + 1)), ("json_schema", {"title": "a" * 2**20})])
def test_grammars_of_more_than_a_megabyte_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SpecbatchError, match="characters; use at most 1048576"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("levels", [10, 300, 400, 450, 480, 500, 2000])
def test_nesting_never_overflows(levels: int) -> None:
    with suppress(RegexError):
        compile_regex("(?:" * levels + "ab" + ")*" * levels)


def test_refusals_cost_their_time_once(watch: Watch) -> None:
    parsed = watch(regex_parser, "_parsed", before=lambda pattern: pattern)
    bad = "(?=x)" + "y" * 11_000
    for _ in range(3):
        with pytest.raises(SpecbatchError, match="lookahead and lookbehind are not regular"):
            SamplingParams(regex=bad)
    assert parsed == [bad]


def test_schemas_are_translated_once(watch: Watch) -> None:
    calls = watch(schema_rewrite, "parse_json", before=lambda text, unique: text)
    for _ in range(3):
        with pytest.raises(RegexError, match="Invalid type: not seen before"):
            checked_schema('{"type": "not seen before"}')
    assert len(calls) == 1


def test_work_is_limited_whatever_time_it_takes() -> None:
    with limited(100, steps=1000):
        spend(1000)
        with pytest.raises(TooMuchWorkError):
            spend(1)


def test_outcomes_are_kept_up_to_a_limit() -> None:
    """As many as three of this size."""
    size = limits.KEPT // 3 - limits.ENTRY
    calls: list[str] = []

    @remembered(RegexError)
    def function(text: str) -> str:
        calls.append(text)
        return text * size

    for text in "abcab":
        assert function(text) == text * size
    assert calls == ["a", "b", "c"]
    assert [function(text)[0] for text in "dac"] == ["d", "a", "c"]  # of a, b and c, the last one used was b
    assert calls == ["a", "b", "c", "d", "c"]
    kept = KeptTexts()
    kept.put("key", "x" * (limits.KEPT + 1))  # one is kept, whatever its size
    assert kept.get("key") is not None
    kept.put("key", "y")
    assert kept.get("key") == "y"
    assert kept.get("\ud800") is None
