"""Log-probabilities of a prompt, as servers give them."""

from __future__ import annotations

import json

import pytest
from misbehaving_server import Misbehaviour, head, misbehaving

from specbatch.engine.scoring import Likelihood
from specbatch.servers.client import Failed
from specbatch.servers.scoring import Scores, likelihood_of
from specbatch.servers.server import Server

CHOSEN = [None, -1.0, -2.0, -0.5]
TOP = [None, {"a": -1.0, "b": -3.0}, {"c": -1.5, "d": -2.0}, {"e": -0.5}]


def answer(chosen=CHOSEN, top=TOP):
    return {"choices": [{"logprobs": {"token_logprobs": chosen, "top_logprobs": top}}]}


@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [
        (1, 3, Likelihood(-3.0, False)),
        (1, 2, Likelihood(-1.0, True)),
        (2, 3, Likelihood(-2.0, False)),
        (1, 4, Likelihood(-3.5, False)),
    ],
)
def test_sum_of_the_continuation(begin, end, found):
    """The token that was generated counts in none; a server may leave it out."""
    assert likelihood_of(answer(CHOSEN[: end + 1], TOP[: end + 1]), begin, end) == found


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"choices": [{"text": "a", "logprobs": None}]}, "no log-probabilities"),
        ({"choices": []}, "no log-probabilities"),
        (answer(CHOSEN[:2], TOP[:2]), "log-probabilities of 2 tokens for a prompt of 3, echoed"),
        (answer(top=[None] * 4), "no log-probability of token 1"),
        (answer([None, None, -1.0, -1.0]), "no log-probability of token 1"),
        (answer([None, "x", -1.0, -1.0]), "no log-probability of token 1"),
        (answer([None, float("nan"), -1.0, -1.0]), "no log-probability of token 1"),
        (answer(top=[None, {}, {"c": -1.5}, {}]), "no log-probability of token 1"),
    ],
)
def test_answers_without_them(given, reason):
    with pytest.raises(Failed, match=reason):
        likelihood_of(given, 1, 3)


def test_each_text_has_its_likelihood_or_the_reason():
    good = [head("200 OK", "application/json"), json.dumps(answer()).encode()]
    bad = [head("500 Internal Server Error", "application/json"), b'{"error": "no"}']
    script, kept = Misbehaviour(), []
    script.steps = lambda path: good if len(kept) == 0 else bad  # type: ignore[method-assign]
    with misbehaving(script) as url:
        scores = Scores(Server(url), "org/toy")
        found = scores.of([([5], [6, 7])] * 2, 1, lambda index, one: kept.append((index, one)))
    assert found == [Likelihood(-3.0, False), "HTTP 500: no"]
    assert kept == [(0, Likelihood(-3.0, False))]
    assert scores.tally.numbers()["scored_tokens"] == 2
