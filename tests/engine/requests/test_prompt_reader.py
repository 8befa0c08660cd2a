"""Prompts that an engine can never run are refused."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch import SpecbatchError
from specbatch.engine.requests.prompt_reader import check_size


def caps(pages: int = 50, slots: int = 1) -> dict[str, Any]:
    return {"max_model_len": 60, "kv_pages": pages, "page_size": 4, "verify_slots": slots}


@pytest.mark.parametrize(
    ("prompt", "limit", "named", "works"),
    [
        (0, 5, "prompt 7=''", "at least one"),
        (55, 6, "max_new_tokens of prompt 7=6", "55 tokens leave room for 5 of max_model_len=60"),
        (60, 1, "max_new_tokens of prompt 7=1", "has 60 tokens and max_model_len=60; shorten it"),
    ],
)
def test_a_request_that_could_never_run_is_refused(prompt: int, limit: int, named: str, works: str) -> None:
    with pytest.raises(SpecbatchError) as caught:
        check_size(caps(), prompt, limit, 7)
    assert named in str(caught.value)
    assert works in str(caught.value)


def test_a_pool_too_small_for_a_request_is_refused() -> None:
    check_size(caps(pages=8, slots=3), 20, 6, 0)
    with pytest.raises(SpecbatchError, match="kv_pages=8: prompt 0 with its output needs 9"):
        check_size(caps(pages=8, slots=3), 20, 7, 0)
    with pytest.raises(SpecbatchError, match="kv_pages=8: the prompt with its output needs 9"):
        check_size(caps(pages=8, slots=3), 20, 7, None)
