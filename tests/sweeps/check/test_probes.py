"""Where a probe looks: places whose change is certain by the log-probabilities of the server."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from specbatch.errors import SpecbatchError
from specbatch.servers.replies import Reply
from specbatch.sweeps.check.options import PROBES, probes_of
from specbatch.sweeps.check.places import (
    clear_tokens,
    first_change,
    hot_chances,
    largest_gap,
    lead,
    repeats,
    stop_place,
)
from specbatch.sweeps.check.probes import Probes
from specbatch.sweeps.check.sampling_probes import differs


def reply(*places: dict[int, float], chosen: tuple[int, ...] = ()) -> Reply:
    tokens = list(chosen) or [max(top, key=lambda token: top[token]) for top in places]
    return Reply(
        "", tokens, list(tokens), [top[token] for top, token in zip(places, tokens, strict=True)], list(places)
    )


def test_leads() -> None:
    found = reply({1: -0.1, 2: -3.0}, {3: -0.7, 4: -0.9}, {5: -0.2, 6: -4.0})
    assert [lead(found, place) for place in range(3)] == pytest.approx([2.9, 0.2, 3.8])
    assert (clear_tokens(found, 0.5), clear_tokens(found, 0.1), clear_tokens(found, 9.0)) == (1, 3, 0)
    assert largest_gap(reply({1: -0.1, 2: -3.0}, chosen=(2,))) == pytest.approx(2.9)


@pytest.mark.parametrize("others", [[0.1], [0.05, 0.05], [0.02] * 5])
def test_hot_chances_are_bounds(others: list[float]) -> None:
    best = 1 - sum(others)
    exact = best**0.5 / (best**0.5 + sum(value**0.5 for value in others))
    bound = hot_chances(Reply(logprobs=[math.log(best)]))[0]
    assert exact <= bound + 1e-12
    assert len(others) > 1 or bound == pytest.approx(exact)


def test_places_that_penalties_change() -> None:
    found = reply({1: -0.1, 2: -3.0}, {3: -0.4, 1: -1.4}, {3: -0.4, 8: -1.0})
    assert first_change(found, set(), is_raised=True, least=1.5) == 2, "1 is there already, and 1 below 3"
    assert first_change(found, {3}, is_raised=True, least=1.5) is None, "some servers raise 3 of the prompt as well"
    assert first_change(found, set(), is_raised=True, least=0.5) is None
    assert first_change(found, set(), is_raised=False, least=1.5) == 3, "8 is new, and 0.6 below 3"
    assert first_change(found, {8}, is_raised=False, least=1.5) is None


def test_stop_places() -> None:
    assert stop_place("abcabcabd") == 2, "ca is nowhere before"
    assert stop_place("aaaaaaa") is None
    assert stop_place("") is None


def probes(answer: Callable[[dict[str, Any]], Reply], prompt: tuple[int, ...] = (1,), **settings: Any) -> Probes:
    """Of a server that gives `answer` to the fields of a request."""
    return Probes(
        lambda sent: [answer(fields) for _, fields in sent], [list(prompt)], {}, 0.5, lambda text: [],
        lambda ids: "".join(chr(96 + one) for one in ids), **settings,
    )  # fmt: skip


def test_refused_requests() -> None:
    refused = Reply(error="HTTP 400: no", status=400)
    found = probes(lambda fields: refused).run(("stop", "seed"))
    assert [(probe.name, probe.result, probe.detail) for probe in found] == [
        ("seed", "refused", "HTTP 400: no"),
        ("stop", "refused", "HTTP 400: no"),
    ]


# Of SGLang: ids of the answer, and texts with the log-probabilities.
PLACES = [{"a": -0.1, "b": -3.0}, {"c": -0.4, "a": -1.4}, {"d": -0.1, "e": -4.0}, {"f": -0.1, "g": -4.0}]
SGLANG = Reply("acdf", [1, 3, 4, 6], ["a", "c", "d", "f"], [-0.1, -0.4, -0.1, -0.1], PLACES)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("prompt", "changed", "found"),
    [
        ((9,), {2: [1, 1]}, ("honored", "")),
        ((9,), {}, ("ignored", "-2 does not change an answer that it must change")),
        ((3,), {}, ("not tested", "no answer that it must change")),  # c is in the prompt, which a server may count
        ((9,), {32: [1, 3, 5, 6]}, ("wrong", "-2 changes token 2 first, and must change one of the first 2 tokens")),
    ],
)
def test_penalties_of_a_server_with_texts_and_ids(
    prompt: tuple[int, ...], changed: dict[int, list[int]], found: tuple[str, str]
) -> None:
    def answer(fields: dict[str, Any]) -> Reply:
        return Reply(ids=changed.get(fields["max_tokens"], SGLANG.ids)) if "presence_penalty" in fields else SGLANG

    (probe,) = probes(answer, prompt, greedy={0: SGLANG}, length=32, doubt="x").run(("logprobs",))
    assert probe.result == "honored"
    probe = probes(answer, prompt, greedy={0: SGLANG}, length=32)._one("presence_penalty")
    assert (probe.result, probe.detail) == found


def test_min_tokens_of_a_server_that_refuses_logit_bias() -> None:
    """vLLM with drafts does."""
    asked: list[dict[str, Any]] = []

    def answer(fields: dict[str, Any]) -> Reply:
        asked.append(fields)
        return Reply(error="HTTP 400: not yet supported with speculative decoding.", status=400)

    same = Reply("aaaaaa", [1] * 6)
    probe = probes(answer, greedy={0: same}, end=2)._one("min_tokens")
    assert (probe.result, len(asked)) == ("not tested", 1)
    assert asked[0]["logit_bias"] == {"2": 100}


def test_names() -> None:
    assert (probes_of("probes", "all"), probes_of("probes", "none")) == (PROBES, ())
    assert probes_of("probes", "top-p, stop") == ("top_p", "stop")
    with pytest.raises(SpecbatchError, match="probes='x': use all, none, or some of temperature"):
        probes_of("probes", "x")


def test_one_token_that_is_shown_is_compared_with_a_text_of_which_none_are() -> None:
    """llama.cpp with drafts shows the tokens of an answer of one token, and not those of a longer one."""
    longer = Reply(" Paris.", finish_reason="length")
    assert not differs(Reply(" Paris", [7], [7]), longer, 1)
    assert differs(Reply(" Rome", [8], [8]), longer, 1)


# 1 and 5 are near ties with 9 wherever they stand; 1 is in the prompt.
REPEATED = reply({1: -0.6, 9: -0.7}, {7: -0.1, 9: -3.0}, {1: -0.6, 9: -0.7}, {5: -0.6, 9: -0.7}, {5: -0.6, 9: -0.7})


def test_places_that_a_repetition_penalty_changes() -> None:
    assert repeats(REPEATED, {1}) == ([3, 5], [1]), "1 and 5 of the answer, after 1 of the prompt"
    assert repeats(REPEATED, {1, 5}) == ([3, 5], [1]), "5 of the prompt comes when 1 of the answer may be changed"
    assert repeats(REPEATED, {7}) == ([3, 5], []), "7 leads"
    assert repeats(REPEATED, {1, 9}) == ([], []), "no other token is near"


def _penalized(prompt: set[int], answer: Reply) -> Callable[[dict[str, Any]], Reply]:
    """A server that gives 9 in place of a near tie which the answer had before, or the prompt."""

    def reply_to(fields: dict[str, Any]) -> Reply:
        seen, found = set(prompt), []
        for place, token in enumerate(answer.pieces):
            is_changed = "repetition_penalty" in fields and token in seen and lead(answer, place) < 0.5
            found.append(9 if is_changed else token)
            seen.add(token)
        return Reply("", found, list(found)) if "repetition_penalty" in fields else answer

    return reply_to


NEAR = reply({1: -0.6, 8: -0.7}, {2: -0.6, 8: -0.7}, {1: -0.6, 8: -0.7}, {2: -0.6, 8: -0.7})


@pytest.mark.parametrize(
    ("answer", "counted", "found"),
    [
        (NEAR, {1, 2}, ("honored", "")),
        (NEAR, set(), ("honored", "tokens of the prompt do not count")),  # SGLang 0.5.23
        (reply(*NEAR.top[:2]), {1, 2}, ("honored", "")),
        (reply(*NEAR.top[:1]), {1, 2}, ("honored", "")),
        (reply(*NEAR.top[:1]), set(), ("not tested", "no answer that it must change")),  # one tie, of a small logit
        (
            reply(*NEAR.top[:2]),
            set(),
            ("not tested", "tokens of the prompt do not count, and no answer repeats its own"),
        ),
        (reply({4: -0.1, 8: -4.0}), set(), ("not tested", "no answer that it must change")),
    ],
)
def test_repetition_penalty(answer: Reply, counted: set[int], found: tuple[str, str]) -> None:
    asked = probes(_penalized(counted, answer), (1, 2), greedy={0: answer}, length=32)
    probe = asked._one("repetition_penalty")
    assert (probe.result, probe.detail) == found


def test_repetition_penalty_that_is_ignored() -> None:
    probe = probes(lambda fields: NEAR, (1, 2), greedy={0: NEAR}, length=32)._one("repetition_penalty")
    assert probe.result == "ignored"
