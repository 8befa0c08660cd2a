"""The registry of drafting algorithms."""

from __future__ import annotations

from importlib import import_module

import pytest

from specbatch.algorithms import ALGORITHMS, algorithms_with, causes_of_low_acceptance
from specbatch.config.engine_config import EngineConfig, Speculation


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_entry_names_a_module_with_a_plan(name: str) -> None:
    assert callable(import_module(ALGORITHMS[name].module).plan)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_an_entry_is_one_of_the_configuration(name: str) -> None:
    fields = {*Speculation.__dataclass_fields__, *EngineConfig.__dataclass_fields__}
    assert set(ALGORITHMS[name].settings) <= fields


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_default_shape_is_a_chain(name: str) -> None:
    tokens = ALGORITHMS[name].default_tokens
    assert Speculation(name, draft="self:skip=1" if ALGORITHMS[name].draft else None).shape == (tokens, 1, tokens)


def test_algorithms_with_a_setting() -> None:
    assert algorithms_with("draft_rope_theta") == ("eagle", "eagle3", "peagle")
    assert algorithms_with("no such setting") == ()


def test_causes_of_low_acceptance_depend_on_the_algorithm() -> None:
    for cause in ("convention", "rope theta", "thinking mode", "another target"):
        assert cause in causes_of_low_acceptance("eagle3", "auto")
    assert "rope theta" in causes_of_low_acceptance("standalone", "auto")
    assert "convention" not in causes_of_low_acceptance("standalone", "auto")
    assert "theta" not in causes_of_low_acceptance("ngram", "auto")
    assert all("random" in causes_of_low_acceptance(name, "dummy") for name in ALGORITHMS)
