"""The registry of drafting algorithms."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from targets import SPECULATIONS

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION, algorithm_of, algorithms_with, causes_of_low_acceptance
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation


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


def test_every_algorithm_is_in_the_lossless_matrix() -> None:
    tested = {how.get("algorithm", NO_SPECULATION) for how in SPECULATIONS.values()}
    assert tested == {name for name, entry in ALGORITHMS.items() if entry.alias_of is None}


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, None),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 7}, "peagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 0}, "peagle"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "domino"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": None}}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": ["projector_type"]}, "dflash"),
        ({"architectures": ["DominoDraftModel"], "projector_type": "domino"}, "domino"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "lilicorr"),
        ({"architectures": ["Qwen3XPressModel"]}, "xpress"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 8}, "dspark"),
        ({"architectures": ["DSparkDraftModel"]}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"speculators_model_type": "dspark", "markov_rank": 0}, "dflash"),
        ({"speculators_model_type": "mtp"}, "mtp"),
        ({"speculators_model_type": "another"}, None),
        ({"architectures": [["DFlashDraftModel"]]}, None),
        ({"architectures": ["A", "DFlashDraftModel"]}, None),
    ],
)
def test_the_algorithm_of_a_published_draft(config: dict[str, Any], algorithm: str | None) -> None:
    assert algorithm_of(config) == algorithm


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
