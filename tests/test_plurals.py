"""Counts in messages."""

from specbatch.plurals import counted


def test_one_is_singular() -> None:
    assert [counted(number, "request") for number in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]
