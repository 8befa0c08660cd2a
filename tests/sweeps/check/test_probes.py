"""Where a probe looks: places whose change is certain by the log-probabilities of the server."""

from __future__ import annotations

import math

import pytest

from specbatch.errors import SpecbatchError
from specbatch.servers.replies import Reply
from specbatch.sweeps.check.options import PROBES, probes_of
from specbatch.sweeps.check.places import clear_tokens, first_change, hot_chances, largest_gap, lead, stop_place
from specbatch.sweeps.check.probes import Probes, _differs


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


def test_refused_requests() -> None:
    refused = Reply(error="HTTP 400: no", status=400)
    found = Probes(lambda sent: [refused] * len(sent), [[1]], {}, 0.5, lambda text: []).run(("stop", "seed"))
    assert [(probe.name, probe.result, probe.detail) for probe in found] == [
        ("seed", "refused", "HTTP 400: no"),
        ("stop", "refused", "HTTP 400: no"),
    ]


def test_names() -> None:
    assert (probes_of("probes", "all"), probes_of("probes", "none")) == (PROBES, ())
    assert probes_of("probes", "top-p, stop") == ("top_p", "stop")
    with pytest.raises(SpecbatchError, match="probes='x': use all, none, or some of temperature"):
        probes_of("probes", "x")


def test_one_token_that_is_shown_is_compared_with_a_text_of_which_none_are() -> None:
    """llama.cpp with drafts shows the tokens of an answer of one token, and not those of a longer one."""
    longer = Reply(" Paris.", finish_reason="length")
    assert not _differs(Reply(" Paris", [7], [7]), longer, 1)
    assert _differs(Reply(" Rome", [8], [8]), longer, 1)
