"""Options of an engine on the command line, and the configuration that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbatch.cli.options import ONLY_WITH_DRAFTS, EngineOptions
from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError


def test_defaults_are_those_of_the_engine():
    assert EngineOptions(device="cpu").config() == EngineConfig(device="cpu", graphs=Graphs())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("none", "v2", None)),
        ({"spec": "off"}, ("none", "v2", None)),
        ({"spec": "off", "algorithm": "ngram"}, ("none", "v2", None)),
        ({"spec": "off", "draft": "self:skip=1-2"}, ("none", "v2", None)),
        ({"spec": "v1"}, ("ngram", "v1", None)),
        ({"spec": "v2"}, ("ngram", "v2", None)),
        ({"spec": "v1", "draft": "small"}, ("standalone", "v1", "small")),
        ({"draft": "small"}, ("standalone", "v2", "small")),
        ({"algorithm": "ngram"}, ("ngram", "v2", None)),
        ({"algorithm": "none", "spec": "v1"}, ("none", "v1", None)),
    ],
)
def test_meaning_of_spec(options, expected):
    speculation = EngineOptions(**options).speculation()
    assert (speculation.algorithm, speculation.schedule, speculation.draft) == expected


def test_settings_of_speculation_are_passed_on():
    numbers = {"draft_tokens": 7, "draft_steps": 7, "ngram_min": 3, "ngram_max": 5, "simulate_accept_length": 2.5}
    found = EngineOptions(spec="v2", **numbers)
    assert found.speculation() == Speculation(algorithm="ngram", **numbers)


def test_number_of_drafts_may_be_auto():
    found = EngineOptions(algorithm="ngram", draft_tokens="auto", draft_steps=7).speculation()
    assert found == Speculation("ngram", draft_tokens="auto", draft_steps=7)
    assert EngineOptions(algorithm="ngram", draft_tokens="5").speculation().num_drafts == 5
    for wrong in ("many", "2.5", ""):
        with pytest.raises(SpecbatchError, match=f"draft_tokens={wrong!r}: use a whole number, or auto"):
            EngineOptions(algorithm="ngram", draft_tokens=wrong).speculation()


def test_settings_of_draft_heads_are_passed_on():
    found = EngineOptions(
        algorithm="eagle3", draft="head", aux_layers="2,18,33", draft_rope_theta=1e4, verification="block"
    )
    expected = Speculation("eagle3", draft="head", aux_layers=(2, 18, 33), draft_rope_theta=1e4, verification="block")
    assert found.speculation() == expected
    assert expected.num_drafts == 3
    assert EngineOptions(algorithm="nextn").speculation().num_drafts == 3


@pytest.mark.parametrize("name", ONLY_WITH_DRAFTS)
def test_setting_of_speculation_without_speculation_is_refused(name):
    with pytest.raises(SpecbatchError, match=f"{name}=9: nothing is drafted"):
        EngineOptions(**{name: 9}).config()
    EngineOptions(**{name: 9}, spec="off").config()


@pytest.mark.parametrize(
    ("max_running", "concurrency", "expected"),
    [(None, None, "auto"), (None, 5, 5), (3, 5, 3), ("3", None, 3), ("auto", 5, "auto")],
)
def test_concurrency_sets_max_running_unless_it_is_given(max_running, concurrency, expected):
    assert EngineOptions(max_running=max_running).config(concurrency=concurrency).max_running == expected


@pytest.mark.parametrize(("option", "expected"), [(None, False), (True, True), (False, False)])
def test_default_of_the_prefix_cache_depends_on_the_command(option, expected):
    assert EngineOptions(prefix_cache=option).config(prefix_cache=False).prefix_cache is expected


def test_zero_is_not_replaced_by_a_default():
    with pytest.raises(SpecbatchError, match="max_running=0"):
        EngineOptions(max_running=0).config(concurrency=4)


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize(
    ("device", "decode", "prefill", "gets"),
    [
        ("cuda", None, None, Graphs("whole", "piecewise")),
        ("cuda", "off", None, Graphs("off", "piecewise")),
        ("cuda", None, "off", Graphs("whole", "off")),
        ("cuda", "off", "off", Graphs()),
        ("cpu", None, None, Graphs()),
    ],
)
def test_default_graphs_by_device(use_gpus, device, decode, prefill, gets, compares):
    """Prefill graphs are off where a command compares configurations with and without them."""
    use_gpus(1)
    found = EngineOptions(device=device, decode_graph=decode, prefill_graph=prefill).config(compares=compares).graphs
    assert found == (replace(gets, prefill="off") if compares and prefill is None else gets)
    options = EngineOptions(device=device, prefill_graph="piecewise")
    if device == "cuda":
        assert options.config(compares=compares).graphs.prefill == "piecewise"
