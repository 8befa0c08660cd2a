"""Regular expressions for the numbers of JSON within bounds."""

from __future__ import annotations

import math
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

INTEGER = "(?:0|[1-9][0-9]*)"
DIGITS = 9  # after the point of a number with bounds, at most
# Below it two numbers with so many digits are different doubles, so that one that is beyond an exclusive bound is not
# read as the bound.
LARGEST_EXCLUSIVE = 10**6


class Bound(NamedTuple):
    """The smallest or largest value; is_open: the value itself is out."""

    value: Decimal
    is_open: bool


def integers(least: float, most: float) -> str:
    """The whole numbers from `least` to `most`, of which there is one, or infinities."""
    options = [f"-{any_of(_natural(max(-most, 1), -least))}"] if least < 0 else []
    options += _natural(max(least, 0), most) if most >= 0 else []
    return any_of(options)


def decimals(least: Bound | None, most: Bound | None) -> str | None:
    """The numbers within bounds, without an exponent and with up to `DIGITS` digits after the point; None if there are
    none."""
    zero = Bound(Decimal(0), True)
    turned = [bound and Bound(bound.value.copy_negate(), bound.is_open) for bound in (most, least)]
    below = _magnitudes(_higher(turned[0], zero), turned[1])  # -0 is left out
    above = _magnitudes(_higher(least, Bound(Decimal(0), False)), most)
    options = [*(f"-{option}" for option in below), *above]
    return any_of(options) if options else None


def any_of(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _higher(one: Bound | None, other: Bound) -> Bound:
    """The stricter one of two lower bounds."""
    return other if one is None else max(one, other)


def _magnitudes(low: Bound, high: Bound | None) -> list[str]:
    """The numbers from `low`, at least 0, to `high`."""
    if high is not None and high.value < low.value:
        return []
    (first, start), (last, end) = _parts(low.value), (math.inf, "") if high is None else _parts(high.value)
    is_open = high is not None and high.is_open
    if first == last:
        return _with_fraction(first, (start, low.is_open), (end, is_open))
    found = _with_fraction(first, (start, low.is_open), None)
    if first + 1 <= last - 1:
        found += [any_of(_natural(first + 1, last - 1)) + rf"(?:\.[0-9]{{1,{DIGITS}}})?"]
    return found + (_with_fraction(int(last), None, (end, is_open)) if high is not None else [])


def _parts(value: Decimal) -> tuple[int, str]:
    """A number that is not negative before and after the point, without zeros at the end."""
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _with_fraction(whole: int, low: tuple[str, bool] | None, high: tuple[str, bool] | None) -> list[str]:
    """A whole number with the fractions between two, each given by its digits and whether it is out itself."""
    found = _fraction(low, high, DIGITS)
    longer = rf"\.{found[1]}" if found[1] else ""
    if found[0]:
        return [f"{whole}(?:{longer})?" if longer else str(whole)]
    return [f"{whole}{longer}"] if longer else []


@lru_cache(1024)
def _fraction(low: tuple[str, bool] | None, high: tuple[str, bool] | None, most: int) -> tuple[bool, str]:
    """Whether no digits are within bounds, which is 0, and an expression for one to `most` digits that are, or ""."""
    if low == ("", False):
        low = None
    if low is high is None:
        return True, f"[0-9]{{1,{most}}}" if most else ""
    is_empty = low is None and high != ("", True)
    if not most or high == ("", True):
        return is_empty, ""
    groups: dict[tuple[tuple[str, bool] | None, tuple[str, bool] | None], list[int]] = {}
    lowest, highest = int(low[0][:1] or 0) if low else 0, int(high[0][:1] or 0) if high else 9
    for digit in range(lowest, highest + 1):
        rest = (
            (low[0][1:], low[1]) if low and digit == lowest else None,
            (high[0][1:], high[1]) if high and digit == highest else None,
        )
        groups.setdefault(rest, []).append(digit)
    options = []
    for rest, digits in groups.items():
        ends, longer = _fraction(*rest, most - 1)
        if ends or longer:
            more = (f"(?:{longer})?" if ends else longer) if longer else ""
            options.append((f"[{digits[0]}-{digits[-1]}]" if len(digits) > 1 else str(digits[0])) + more)
    return is_empty, any_of(options) if options else ""


def _natural(least: float, most: float) -> list[str]:
    """Expressions for the whole numbers from `least`, at least 0, to `most`."""
    if least > most:
        return []
    low = str(least)
    nines = 10 ** len(low) - 1
    if most <= nines:
        return [_digits(low, str(most))]
    if most == math.inf:
        return [_digits(low, str(nines)), f"[1-9][0-9]{{{len(low)},}}"]
    return [_digits(low, str(nines)), *_natural(nines + 1, most)]


def _digits(low: str, high: str) -> str:
    """The numbers between two with the same number of digits."""
    if not low or low == high:
        return low
    more = len(low) - 1
    first, last, options = int(low[0]), int(high[0]), []
    if first == last:
        return low[0] + _digits(low[1:], high[1:])
    if low[1:] != "0" * more:
        options.append(low[0] + _digits(low[1:], "9" * more))
        first += 1
    if high[1:] != "9" * more:
        options.append(high[0] + _digits("0" * more, high[1:]))
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}]" + ("[0-9]" + (f"{{{more}}}" if more > 1 else "") if more else ""))
    return any_of(options)
