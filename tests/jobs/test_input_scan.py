"""The first pass over an input: what it hashes, and that rows that share parameters are cheap."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from specbatch.core.sampling_params import SamplingParams, _made
from specbatch.errors import SpecbatchError
from specbatch.jobs.formats import PromptRows
from specbatch.jobs.input_scan import BadLines, scan

ROWS: list[dict[str, Any]] = [
    {"prompt": 'a "b" \\ é \U0001f600 \t', "id": "x"},
    {"question": "c", "other": 1},
    {"messages": [{"role": "user", "content": "d\ne: f"}], "id": 4},
    {"prompt_token_ids": [1, 2, 3]},
    {"prompt": "g", "sampling": {"temperature": 0.5, "seed": 3}},
]


def form_of(path: Path) -> PromptRows:
    return PromptRows(path, SamplingParams(), seed=0, chat_template=True, split=None, column=None)


def test_the_hash_is_that_of_the_rows_as_json(tmp_path: Path) -> None:
    """A partial output of an earlier version continues only if the hash of its input is the same."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    digest = hashlib.sha256()
    for index, row in enumerate(ROWS):
        form, value = next(
            (name, row[name]) for name in row if name in ("prompt", "question", "messages", "prompt_token_ids")
        )
        identity = [index, form, value, row.get("id")] + ([row["sampling"]] if "sampling" in row else [])
        digest.update(json.dumps(identity).encode() + b"\n")
    assert scan(form_of(path), BadLines(path)).sha256 == digest.hexdigest()


def test_rows_that_share_all_but_the_seed_are_checked_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": "a", "sampling": {"max_new_tokens": 5, "seed": place}} for place in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = _made.cache_info().misses
    found = [row.params for row in form_of(path).rows()]
    assert found == [SamplingParams(max_new_tokens=5, seed=place) for place in range(100)]
    assert _made.cache_info().misses - before <= 2


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"seed": None},
        {"seed": 7, "stop": ["a", "b"], "logit_bias": {"3": 1.5}, "bad_words": "x"},
        {"json_schema": {"type": "integer"}, "seed": -1},
        {"top_logprobs": 2, "max_new_tokens": 9},
    ],
)
def test_parameters_of_a_row(values: dict[str, Any]) -> None:
    assert SamplingParams.of_row(values) == SamplingParams(**values)
    base = SamplingParams(temperature=0.5, seed=4, regex="a+")
    assert base.with_row(values) == base.updated(values)


@pytest.mark.parametrize(
    ("values", "setting"),
    [({"seed": 1.5}, "seed"), ({"seed": True}, "seed"), ({"seed": "1"}, "seed"), ({"top_p": 0, "seed": 1}, "top_p")],
)
def test_parameters_of_a_row_that_are_refused(values: dict[str, Any], setting: str) -> None:
    for _ in range(2):
        with pytest.raises(SpecbatchError) as found:
            SamplingParams.of_row(values)
        assert (found.value.setting, found.value.value) == (setting, values[setting])


def test_large_parameters_are_not_kept() -> None:
    before = _made.cache_info().currsize
    assert len(SamplingParams.of_row({"stop": ["x" * 100_000]}).stop[0]) == 100_000
    assert _made.cache_info().currsize == before


def test_lengths_are_estimated_from_the_rows(tmp_path: Path) -> None:
    """Of token ids exactly, of text about one token for four characters; samples count."""
    path = tmp_path / "in.jsonl"
    rows: list[dict[str, Any]] = [{"prompt_token_ids": [*range(20_000, 20_300)], "sampling": {"max_new_tokens": 7}}]
    rows += [{"prompt": "Words, and more words. " * 50, "sampling": {"n": 3}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = scan(form_of(path), BadLines(path))
    assert (found.answers, found.new_tokens) == (4, 7 + 3 * 128)
    assert found.prompt_tokens == pytest.approx(300 + 3 * 23 * 50 / 4, rel=0.05)
    assert found.shared_tokens < 3


@pytest.mark.parametrize("form", ["prompt", "messages", "prompt_token_ids"])
def test_what_all_prompts_begin_with_is_estimated(tmp_path: Path, form: str) -> None:
    path, text, ids = tmp_path / "in.jsonl", "Words, and more words. " * 50, [*range(20_000, 20_300)]
    values: dict[str, Any] = {
        "prompt": [text + end for end in ("a b", "c", "a d")],
        "messages": [[{"role": "system", "content": text}, {"role": "user", "content": end}] for end in "cab"],
        "prompt_token_ids": [[*ids, end] for end in (5, 777, 5)],
    }
    path.write_text("".join(json.dumps({form: value}) + "\n" for value in values[form]))
    wanted = 300 if form == "prompt_token_ids" else 23 * 50 / 4
    assert scan(form_of(path), BadLines(path)).shared_tokens == pytest.approx(wanted, rel=0.08)
