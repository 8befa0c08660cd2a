"""The support matrix: every family and algorithm has an entry, and an entry is what an engine says."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION
from specbatch.engine import support
from specbatch.models import registry as models
from specbatch.weights.shapes import SHAPES


def test_every_family_and_algorithm_is_listed():
    listed = {name for shape in support.FAMILIES.values() for name in SHAPES[shape]["architectures"]}
    like = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}  # the text part of a listed family
    like.add("Gemma4ForConditionalGeneration")  # around a listed family
    like.add("MinistralForCausalLM")  # a Mistral with windows in some layers
    like |= {
        "Glm4MoeLiteForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
    }  # DeepSeek-V3
    assert listed | like == {*models.FAMILIES, *models._OTHERS}
    algorithms = {name for name, entry in ALGORITHMS.items() if entry.alias_of is None and name != NO_SPECULATION}
    assert {algorithm for algorithm, _ in support.DRAFTS.values()} == algorithms


def test_refusals_are_those_of_an_engine():
    found = {(item.what, item.draft): item for item in support.of_settings("cpu")}
    assert found["chain", "dflash"].runs
    assert found["tree (--draft-topk)", "eagle3"].runs
    assert all(found["tree (--draft-topk)", name].runs for name, entry in ALGORITHMS.items() if entry.tree == "block")
    assert "drafts chains only" in found["tree (--draft-topk)", "peagle"].why
    assert "samples no drafts" in found["--verification block", "ngram"].why
    assert "needs a CUDA device" in found["--decode-graph whole", "mtp"].why


@pytest.mark.parametrize("family", ["Qwen3-Next", "Qwen3.5", "Nemotron-H", "LFM2"])
@pytest.mark.parametrize("setting", ["tree (--draft-topk)", "--draft-tokens auto"])
def test_recurrent_drafts_make_chains_of_a_fixed_number(family: str, setting: str) -> None:
    """As a note of `doctor` says, whose table of settings has a target with attention in all layers."""
    why = support.refusal("self:skip", support.FAMILIES[family], "", [setting], device="cpu")
    assert "recurrent layers" in why


@pytest.mark.slow
def test_every_family_runs_with_every_draft_but_uno_which_adapts_dense_layers():
    refused = {(item.what, item.draft) for item in support.of_families("cpu") if not item.runs}
    dense = {name for name in support.FAMILIES if name.split(",")[0] in ("Llama", "Mistral", "Qwen2", "Qwen3")}
    assert refused == {(name, "uno") for name in support.FAMILIES.keys() - dense}


@pytest.mark.slow
def test_settings_combine_unless_two_of_them_conflict():
    alone = {(item.what, item.draft): item.runs for item in support.of_settings("cpu")}
    some = random.Random(0)
    sets = [*combinations(support.SETTINGS, 2), *(some.sample([*support.SETTINGS], 4) for _ in range(50))]
    conflicts = set(map(frozenset, support.CONFLICTS))
    with support._draft_models([support._SMALL]) as files:
        for settings in filter(_has_one_value_of_each, sets):
            for draft in support.DRAFTS:
                why = support.refusal(draft, support._SMALL, files[support._SMALL], settings, device="cpu")
                runs = all(alone[setting, draft] for setting in settings)
                runs = runs and not any(frozenset(pair) in conflicts for pair in combinations(settings, 2))
                assert (why == "") == runs, (draft, settings, why)


def _has_one_value_of_each(settings):
    changed = [name for setting in settings for changes in support.SETTINGS[setting] for name in changes]
    return len(set(changed)) == len(changed)
