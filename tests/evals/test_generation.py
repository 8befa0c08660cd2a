"""Generation arguments: which are supported, what they mean, and which of several counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specbatch.core.sampling_params import SamplingParams, sampling_of, sampling_text
from specbatch.errors import SpecbatchError
from specbatch.evals.generation import LIMITS, Generation, generation_of, parsed

TOY = ("task", "toy")


def made(chosen: dict[str, Any] | None = None, limit: int | None = None, **wanted: Any) -> Generation:
    return generation_of(wanted, TOY, chosen or {}, limit)


@pytest.mark.parametrize(
    ("wanted", "params"),
    [
        ({}, {"temperature": 0.0, "max_new_tokens": 256}),
        ({"max_tokens": "9"}, {"temperature": 0.0, "max_new_tokens": 9}),
        ({"repetition_penalty": 1.1, "min_new_tokens": 3}, {"repetition_penalty": 1.1, "min_tokens": 3}),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        ({"temperature": 1, "top_k": 20, "min_p": 0.1}, {"temperature": 1.0, "top_k": 20, "min_p": 0.1}),
        ({"do_sample": 1, "temperature": 0.5, "top_p": None}, {"temperature": 0.5}),
        ({"do_sample": 0, "temperature": 0.5}, {"temperature": 0.0}),
        ({"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "length_penalty": 1.0}, {"temperature": 0.0}),
    ],
)
def test_arguments_with_a_meaning_here(wanted: dict[str, Any], params: dict[str, Any]) -> None:
    found = made(**wanted).params
    assert {name: found[name] for name in params} == params
    assert found.keys() - params.keys() <= {"temperature", "max_new_tokens"}
    SamplingParams(**found)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"num_beams": 10}, "sets num_beams=10, which the engine does not support; leave it out"),
        ({"no_repeat_ngram_size": 3, "typical_p": 0.5}, "sets no_repeat_ngram_size=3, typical_p=0.5, which"),
        ({"max_length": 100}, "max_length: it limits prompt and answer together: use max_gen_toks"),
        ({"stop": ["x"]}, "stop: use until"),
        ({"until": None}, "sets until=None; use a text or a list of texts"),
        ({"until": [1]}, "sets until=[1]; use"),
        ({"until": {"a": 1}}, "sets until={'a': 1}; use"),
        ({"until": ""}, "sets until='', but a stop string must not be empty; use until=[] for none"),
        ({"until": ["a", ""]}, "a stop string must not be empty"),
        ({"do_sample": "true"}, "sets do_sample='true'; use true or false"),
        ({"do_sample": True}, "sets do_sample=True without a temperature: transformers does not sample with"),
        ({"do_sample": True, "temperature": 0}, "sets do_sample=True without a temperature"),
        ({"temperature": "0.7"}, "sets temperature='0.7'; use 0 (greedy) or a positive number"),
        ({"temperature": None}, "sets temperature=None"),
        ({"temperature": -1.0}, "sets temperature=-1.0"),
        ({"temperature": math.nan}, "sets temperature=nan"),
        ({"max_gen_toks": 0}, "sets max_gen_toks=0; use a whole number of at least 1"),
        ({"max_tokens": "many"}, "sets max_tokens='many'"),
        ({"top_p": 2}, "sets top_p=2; use a value above 0 and up to 1"),  # also without an effect
        ({"top_k": 1.5, "temperature": 1}, "sets top_k=1.5; use 0 (off) or a positive whole number"),
        ({"repetition_penalty": 0}, "sets repetition_penalty=0; use a number from 0.01"),
        ({"min_new_tokens": -1}, "sets min_new_tokens=-1; use a whole number"),
        ({"min_new_tokens": 9, "max_gen_toks": 8}, "sets min_new_tokens=9, but answers have at most 8 tokens"),
    ],
)
def test_arguments_that_are_refused(wanted: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecbatchError) as refused:
        made(**wanted)
    assert str(refused.value).startswith("task='toy': sets ")
    assert reason in str(refused.value)


@pytest.mark.parametrize("count", range(1, 5))
def test_the_first_of_several_limits_counts(count: int) -> None:
    wanted = {name: place for place, name in enumerate(LIMITS[-count:], start=3)}
    found = generation_of(dict(reversed(wanted.items())), TOY, {}, None)
    assert found.params["max_new_tokens"] == 3
    assert len(found.notes) == (count > 1)
    if count > 1:
        assert found.notes[0].startswith(f"{LIMITS[-count]}=3 counts and {LIMITS[1 - count]}=4")
    assert made(limit=7, **wanted).params["max_new_tokens"] == 7
    assert made(limit=7, **wanted).notes == ()


def test_chosen_parameters_replace_those_of_the_task() -> None:
    assert made({"temperature": 0.6}, do_sample=True).params["temperature"] == 0.6
    assert made({"temperature": 0.6}, do_sample=False, temperature=0.3).params["temperature"] == 0.6
    assert made({"temperature": 0.6}, do_sample=False, temperature=0.3).notes == ()
    assert made({"top_p": 0.9}, temperature=0.3, top_p=0.5).params["top_p"] == 0.9
    with pytest.raises(SpecbatchError, match=r"^top_p=0.9: greedy answers are not sampled; add a temperature"):
        made({"top_p": 0.9})


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("temperature=0.8,top_p=0.95", {"temperature": 0.8, "top_p": 0.95}),
        ("do_sample=True,until=['a,b', \"c\"]", {"do_sample": True, "until": ["a,b", "c"]}),
        ("until=Q:,max_gen_toks=32", {"until": "Q:", "max_gen_toks": 32}),
        ('{"until": ["\\n"], "top_k": 5}', {"until": ["\n"], "top_k": 5}),
    ],
)
def test_text_of_gen_kwargs(text: str, arguments: dict[str, Any]) -> None:
    assert parsed(text) == arguments


@pytest.mark.parametrize(
    "text", ["5", "temperature", '{"a"', "[1]", "num_beams=4", "until=", "max_gen_toks=0", "min_p=2"]
)
def test_text_of_gen_kwargs_that_is_refused(text: str) -> None:
    with pytest.raises(SpecbatchError, match=r"^gen_kwargs="):
        parsed(text)


def test_adjusted_answers_in_records_and_tables() -> None:
    def described(**params: Any) -> tuple[Any, str]:
        found = sampling_of(SamplingParams(**params))
        return found, sampling_text(found)

    assert described() == (None, "greedy")
    greedy = {"temperature": 0.0, "repetition_penalty": 1.1, "min_tokens": 4}
    assert described(repetition_penalty=1.1, min_tokens=4) == (
        greedy,
        "greedy, repetition-penalty 1.1, min-tokens 4",
    )
    found, text = described(temperature=0.5, presence_penalty=1.5)
    assert found == {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 1.5}
    assert text == "temperature 0.5, presence-penalty 1.5"
