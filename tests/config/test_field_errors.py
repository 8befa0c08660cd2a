"""Validation errors in one line: field, JSON value, what works."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specbatch.config.field_errors import did_you_mean, first_problem
from specbatch.errors import refuse_json


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    share: float = Field(0.5, gt=0, le=1, allow_inf_nan=False)


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1)
    kind: Literal["a", "b"] = "a"
    ids: str | list[int] | list[list[str]] = []
    inner: list[Inner] = Field([], max_length=2)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (None, "use an object"),
        ({}, "name is missing"),
        ({"name": None}, "name=null: use a string"),
        ({"name": ""}, 'name="": it must not be empty'),
        ({"name": True, "kind": "c"}, "name=true: use a string (1 more mistake)"),
        ({"name": "x", "kind": None}, 'kind=null: use "a" or "b"'),
        (
            {"name": "x", "ids": [1, True]},
            "ids=[1, true]: use a string, a list of whole numbers or a list of lists of strings",
        ),
        ({"name": "x", "inner": [{"share": 1.5}]}, "inner.0.share=1.5: use at most 1"),
        ({"name": "x", "inner": [{}, {"share": float("nan")}]}, "inner.1.share=NaN: use a finite number"),
        ({"name": "x", "inner": [{"share": "1"}, {"share": 0}]}, 'inner.0.share="1": use a number (1 more mistake)'),
        ({"name": "x", "inner": [{}] * 3}, "inner=[{}, {}, {}]: use at most 2 items"),
        ({"name": "x", "na\nme": 1}, r"na\nme is not supported; leave it out"),
    ],
)
def test_line(value: Any, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Table.model_validate(value)
    assert first_problem(caught.value) == line


def test_unknown_name() -> None:
    with pytest.raises(ValidationError) as caught:
        Table.model_validate({"name": "x", "kinds": 1})
    known = first_problem(caught.value, prefix="body.", names=lambda place: Table.model_fields)
    assert known == "body.kinds is unknown; did you mean kind or ids?"
    assert did_you_mean("zzz", ["a", "b"]) == "use one of a, b"
    assert did_you_mean("ab", ["aab", "abb", "x"]) == "did you mean abb or aab?"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (("a",), '["a"]'),
        ("\ud800\u202e", r'"\ud800\u202e"'),
        ("é", '"é"'),
        (b"x", "b'x'"),
        ({1}, "{1}"),
    ],
)
def test_json_of_a_value_in_a_message(value: object, shown: str) -> None:
    assert str(refuse_json("x", value, "y")) == f"x={shown}: y"
