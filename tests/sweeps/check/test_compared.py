"""Divergences of two answers: rounding or fault, by log-probabilities and by shape."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specbatch.servers.replies import Reply, Token
from specbatch.sweeps.check.compared import (
    EXPECTED,
    FAULT,
    FOUND,
    LEAST_GAP,
    ROUNDING,
    UNJUDGED,
    bound_of,
    compare,
    most_of,
    noise,
)

WANTED = [11, 12, 13, 14, 15, 16, 17, 18]


def reply(tokens: list[int], gap: float = 1.0, other: int = 99, finish: str = "length") -> Reply:
    """Each token leads `other` by `gap`."""
    top = [{token: -0.5, other: -0.5 - gap} for token in tokens]
    return Reply("", list(tokens), list(tokens), [-0.5] * len(tokens), top, finish_reason=finish)


def verdict(
    wanted: Reply, found: Reply, others: dict[int, Reply] | None = None, bound: float = LEAST_GAP
) -> tuple[str, str]:
    parted = compare(0, "together", wanted, found, others or {}, text_of)
    assert parted is not None
    judged = parted.judged(bound, bound)
    return judged.verdict, judged.shape


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(map(str, tokens))


def test_equal() -> None:
    assert compare(0, "again", reply(WANTED), reply(WANTED), {}, text_of) is None


@pytest.mark.parametrize(("gap", "wanted"), [(0.1, ROUNDING), (0.49, ROUNDING), (0.6, FAULT)])
def test_gap(gap: float, wanted: str) -> None:
    changed = [*WANTED[:3], 99, *WANTED[3:-1]]
    changed[4:] = [31, 32, 33, 34]
    assert verdict(reply(WANTED, gap), reply(changed, gap, 14)) == (wanted, "")
    assert verdict(reply(WANTED, gap), reply(changed, 0.01, 14))[0] == wanted, "the larger of both"
    assert verdict(reply(WANTED, gap), reply(changed, gap, 14), bound=2.0)[0] == ROUNDING


def test_a_token_that_is_not_among_the_likely_ones_is_less_likely_than_these() -> None:
    changed = [*WANTED[:3], 77, 31, 32, 33, 34]
    assert verdict(reply(WANTED, 2.0), reply(changed, 2.0))[0] == FAULT


def test_without_log_probabilities() -> None:
    wanted, found = Reply("abcdefgh"), Reply("abcxyzuv")
    assert verdict(wanted, found) == (UNJUDGED, "")


def words(*tokens: str, other: str = "", gap: float = 0.0, at: int = 0) -> Reply:
    """Tokens with log-probabilities; at one place `other` is less likely by `gap`, and the others by 3."""
    top = [
        {token: -0.5, " z": -3.5} | ({other: -0.5 - gap} if place == at else {}) for place, token in enumerate(tokens)
    ]
    return Reply("".join(tokens), [], list(tokens), [-0.5] * len(tokens), top, finish_reason="length")


ANSWER = ("The", " cat", " sat", " on", " it")


@pytest.mark.parametrize(
    ("other", "text", "gap"),
    [
        (" dog", "The dog ran away", 0.2),
        (" d", "The dog ran away", 0.2),  # the text tells no tokens
        (" dog", "The doe ran away", 3.0),  # no likely token goes on so: less likely than all of them
        (" do", "The d", 3.0),  # it goes on further than the text
        ("", "The", 0.2),  # an end token has no text
    ],
)
@pytest.mark.parametrize("lead", ["", " "])
def test_one_side_that_shows_log_probabilities_judges_alone(other: str, text: str, gap: float, lead: str) -> None:
    shown, silent = words(*ANSWER, other=other, gap=0.2, at=1), Reply(lead + text, finish_reason="length")
    shown.text = lead + shown.text
    for sides, by in (((shown, silent), EXPECTED), ((silent, shown), FOUND)):
        parted = compare(0, "alone", *sides, {}, text_of)
        assert parted is not None
        assert (parted.by, parted.gap) == (by, pytest.approx(gap))
        assert parted.judged(bound_of([]), most_of([])).verdict == (FAULT if gap > 2 else ROUNDING)
        assert (parted.wanted, parted.found) != (None, None)


@pytest.mark.parametrize(("gap", "wanted"), [(0.5, ROUNDING), (0.6, UNJUDGED), (1.9, UNJUDGED), (2.1, FAULT)])
def test_without_noise_gaps_in_between_are_not_judged(gap: float, wanted: str) -> None:
    parted = compare(0, "alone", words(*ANSWER, other=" dog", gap=gap, at=1), Reply("The dog ran"), {}, text_of)
    assert parted is not None
    assert parted.judged(bound_of([]), most_of([])).verdict == wanted
    assert most_of([0.2, 0.2]) == bound_of([0.2, 0.2])


def test_tokens_that_are_not_those_of_the_text_judge_nothing() -> None:
    shown = words(*ANSWER, other=" dog", gap=0.1, at=1)
    shown.text = "A cat sat"
    parted = compare(0, "alone", shown, Reply("A dog ran"), {}, text_of)
    assert parted is not None
    assert (parted.gap, parted.by, parted.judged(0.5, 2.0).verdict) == (None, "", UNJUDGED)


@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        ([*WANTED[:3], *WANTED[2:-1]], "a token is repeated, and the rest is as it should be"),
        ([*WANTED[:2], *WANTED[3:], 40], "a token is missing, and the rest is as it should be"),
        (WANTED[:5], "it ends before its length"),
        (list(range(50, 58)), "it is the answer to another prompt (3)"),
    ],
)
def test_shapes(tokens: list[int], shape: str) -> None:
    others = {0: reply(WANTED), 3: reply(list(range(50, 58)))}
    assert verdict(reply(WANTED), reply(tokens, 0.0), others) == (FAULT, shape)


@pytest.mark.parametrize("tokens", [[*WANTED[:3], *WANTED[2:-1]], [*WANTED[:2], *WANTED[3:], 40]])
def test_a_shift_that_rounding_explains_is_no_fault(tokens: list[int]) -> None:
    """Both tokens are nearly as likely, by both sides: found with vLLM 0.33.0, whose answer left out a word."""
    place = next(at for at, token in enumerate(tokens) if token != WANTED[at])
    wanted, found = reply(WANTED, 0.1, tokens[place]), reply(tokens, 0.1, WANTED[place])
    assert verdict(wanted, found) == (ROUNDING, "")
    assert verdict(reply(WANTED, 1.0, tokens[place]), found)[0] == FAULT, "by one side it is not"


@pytest.mark.parametrize("loop", [[15] * 6, [15, 16, 17] * 2])
def test_a_loop_that_begins_a_token_earlier_is_no_shape(loop: list[int]) -> None:
    wanted, found = [11, 12, 13, *loop], [11, 12, *loop, loop[0]]
    assert verdict(reply(wanted, 0.1), reply(found, 0.1, 13)) == (ROUNDING, "")


def test_an_answer_that_two_prompts_have_is_of_neither() -> None:
    others = {place: reply(list(range(50, 58))) for place in (3, 4)}
    assert verdict(reply(WANTED), reply(list(range(50, 58)), 0.0), others)[1] == ""


def test_noise_and_bound() -> None:
    near = reply(WANTED)
    near.logprobs[2] -= 0.3
    near.logprobs[7] -= 5.0
    near.ids[6] = near.pieces[6] = 40
    assert noise(reply(WANTED), near) == pytest.approx(0.3), "before the divergence"
    assert noise(Reply("ab"), Reply("ab")) is None
    assert bound_of([]) == bound_of([0.01, 9.0]) == LEAST_GAP, "one noisy prompt does not count"
    assert bound_of([0.9, 0.9]) == 2.0, "noise of another model explains no larger gaps"
    assert bound_of([0.3, 0.3]) == pytest.approx(1.2)
