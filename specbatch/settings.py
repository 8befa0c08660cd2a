"""Dataclasses of settings: fields with a help text, from which the command line derives its options, and checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from specbatch.errors import refuse


class Rule(NamedTuple):
    """What a value must satisfy, and what an error says that works."""

    fits: Callable[[Any], bool]
    works: str


def setting(
    default: Any = MISSING, help: str = "", rule: Rule | None = None, *, choices: tuple[str, ...] | None = None
) -> Any:
    """A field with its help text, and the rule or the choices that `check_fields` enforces."""
    if choices is not None:
        rule = Rule(lambda value: value in choices, f"use one of {', '.join(choices)}")
    return field(default=default, metadata={"help": help, "rule": rule, "choices": choices})


def check_fields(settings: Any, prefix: str = "") -> None:
    """Refuse values that break the rules of their fields. None is allowed where it is the default. `prefix` is put
    before a field's name."""
    for item in fields(settings):
        rule, value = item.metadata.get("rule"), getattr(settings, item.name)
        if rule is not None and not (value is None and item.default is None) and not rule.fits(value):
            raise refuse(f"{prefix}{item.name}", value, rule.works)


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is finite and no boolean."""
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


def whole(least: int, most: float = math.inf, works: str = "") -> Rule:
    """Whole numbers from `least` to `most`."""
    usual = f"use a whole number of at least {least}" if most == math.inf else f"use {least} to {most}"
    return Rule(lambda value: is_whole(value) and least <= value <= most, works or usual)


def number(fits: Callable[[float], bool], works: str) -> Rule:
    """Finite numbers that fit."""
    return Rule(lambda value: is_number(value) and fits(value), works)


FLAG = Rule(lambda value: isinstance(value, bool), "use True or False")
