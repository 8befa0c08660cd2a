"""Words of messages: counts and lists."""

from specbatch.errors import counted, listed


def test_one_is_singular() -> None:
    assert [counted(number, "request") for number in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]


def test_the_last_word_follows_and() -> None:
    assert [listed("abc"[:count]) for count in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
