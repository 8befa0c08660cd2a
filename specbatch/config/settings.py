"""Dataclasses of settings: fields with a help text, from which the command line derives its options, and checks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

from specbatch.errors import MOST, refuse

T = TypeVar("T", bound=Callable[..., Any])


class Rule(NamedTuple):
    """What a value must satisfy, and what an error says that works."""

    fits: Callable[[Any], bool]
    works: str


def setting(
    default: Any = MISSING,
    help: str = "",
    rule: Rule | None = None,
    *,
    choices: tuple[str, ...] | None = None,
    panel: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str, str], Any] | None = None,
    flags: tuple[str, ...] = (),
) -> Any:
    """A field with its help text, and the rule or the choices that `check_fields` enforces.

    For its command-line option: panel: the box of `--help`; metavar: how the help writes the value; parse: (setting,
    text) -> value, where the value is written as text (`specbatch.config.values`); flags: in place of --NAME, and for a
    boolean of --NAME/--no-NAME.
    """
    if choices is not None:
        several = "one of " if len(choices) > 1 else ""
        rule = Rule(lambda value: value in choices, f"use {several}{', '.join(choices)}")
    option = {"panel": panel, "metavar": metavar, "parse": parse, "flags": flags}
    return field(default=default, metadata={"help": help, "rule": rule, "choices": choices, **option})


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
    try:
        return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number with hundreds of digits
        return False


def whole(least: int, most: int = MOST, works: str = "") -> Rule:
    """Whole numbers from `least` to `most`."""
    usual = f"use {least} to {most}" if most < MOST else f"use a whole number of at least {least} and at most {most}"
    return Rule(lambda value: is_whole(value) and least <= value <= most, works or usual)


def number(fits: Callable[[float], bool], works: str) -> Rule:
    """Finite numbers that fit."""
    return Rule(lambda value: is_number(value) and fits(value), works)


def or_auto(rule: Rule) -> Rule:
    """The values of a rule, and "auto"."""
    return Rule(lambda value: value == "auto" or rule.fits(value), f"{rule.works}, or auto")


FLAG = Rule(lambda value: isinstance(value, bool), "use a boolean")


def foreign_names(works: Mapping[str, str]) -> Callable[[T], T]:
    """Decorate a function or a class: refuse keyword arguments that other libraries have, each with what works here."""

    def decorate(made: Any) -> Any:
        call: Callable[..., Any] = vars(made)["__init__"] if isinstance(made, type) else made

        @functools.wraps(call)
        def checked(*arguments: Any, **named: Any) -> Any:
            for name, value in named.items():
                if name in works:
                    raise refuse(name, value, works[name])
            return call(*arguments, **named)

        if not isinstance(made, type):
            return checked
        setattr(made, "__init__", checked)  # noqa: B010
        return made

    return decorate
