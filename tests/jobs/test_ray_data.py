"""`GenerateBatch`: answers as of `generate`, prompts of every form, and rows that fail."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specbatch import Engine, EngineConfig, SamplingParams, SpecbatchError
from specbatch.jobs.partial_output import row_seed
from specbatch.jobs.ray_data import GenerateBatch

CONFIG = EngineConfig(model="toy", load_format="dummy", device="cpu", max_model_len=64, max_running=4)
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.9, ignore_eos=True)
TEXTS = ["one", "two", "three", "one"]


def objects(*values: Any) -> Any:
    found = np.empty(len(values), object)
    found[:] = values
    return found


@pytest.fixture(scope="module")
def generate() -> GenerateBatch:
    return GenerateBatch(CONFIG, PARAMS)


def test_answers_depend_on_the_prompt_or_on_an_index(generate: GenerateBatch) -> None:
    batch = {"prompt": np.array(TEXTS), "other": np.arange(4)}
    found = generate(batch)
    assert found["other"].tolist() == [0, 1, 2, 3]
    assert found["error"].tolist() == [None] * 4
    assert found["output_tokens"].tolist() == [8] * 4
    assert found["text"][0] == found["text"][3] != found["text"][1]
    alone = generate({"prompt": np.array(["three"])})
    assert alone["token_ids"][0].tolist() == found["token_ids"][2].tolist()
    numbered = GenerateBatch(CONFIG, PARAMS, column="body", index="row")
    answers = numbered({"body": np.array(TEXTS), "row": np.arange(7, 11)})
    params = [replace(PARAMS, seed=row_seed(0, number)) for number in range(7, 11)]
    with Engine(CONFIG) as engine:
        wanted = engine.generate(TEXTS, params)
    assert [ids.tolist() for ids in answers["token_ids"]] == [item.token_ids for item in wanted]


def test_prompts_may_be_token_ids_and_bad_rows_have_an_error(generate: GenerateBatch) -> None:
    found = generate({"prompt_token_ids": objects(np.array([1, 2, 3]), np.array([]), np.arange(60), [1, 2, 3])})
    assert found["finish_reason"].tolist() == ["length", "error", "error", "length"]
    assert found["text"][0] == found["text"][3]
    assert "is empty" in found["error"][1]
    assert "max_new_tokens=8" in found["error"][2]
    assert "write a JSON object with one of the keys prompt" in generate({"text": np.array(["a"])})["error"][0]


def test_parameters_in_columns_of_their_own_are_named_once(generate: GenerateBatch) -> None:
    batch = {"prompt": np.array(["a"]), "json_schema": objects({"type": "object"}), "source": np.array(["b"])}
    with pytest.warns(UserWarning, match="^json_schema beside the prompt has no effect; .* go into the column"):
        generate(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(batch)


def test_one_answer_for_each_row() -> None:
    with pytest.raises(SpecbatchError, match="n=2: a row has one answer"):
        GenerateBatch(CONFIG, replace(PARAMS, n=2))


def test_rows_with_their_own_sampling(generate: GenerateBatch) -> None:
    own = objects({"max_new_tokens": 3, "n": None}, None, {"n": 2, "max_new_tokens": None}, {"max_tokens": 4})
    found = generate({"prompt": np.array(TEXTS), "sampling": own})
    assert found["output_tokens"].tolist() == [3, 8, 0, 0]
    assert "n=2: a row has one answer" in found["error"][2]
    assert 'no parameter "max_tokens"; use max_new_tokens' in found["error"][3]
