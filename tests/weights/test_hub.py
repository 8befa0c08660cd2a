from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from specbatch.errors import SpecbatchError
from specbatch.weights import hub, open_checkpoint


def test_unreachable_hub_names_alternatives(answer_as_hub: Callable[..., None]) -> None:
    def unreachable(*arguments: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("Cannot reach the hub.\nMore words on a second line.")

    answer_as_hub(unreachable)
    with pytest.raises(SpecbatchError) as error:
        open_checkpoint("Qwen/Qwen2.5-0.5B")
    message = str(error.value)
    assert message.startswith("model='Qwen/Qwen2.5-0.5B'")
    assert "\n" not in message
    for part in ("Cannot reach the hub", "smollm2-135m", "folder", "specbatch models pull smollm2-135m"):
        assert part in message
    with pytest.raises(SpecbatchError, match=r"tokenizer='Qwen/Qwen2.5-0.5B'.*tokenizer.json"):
        open_checkpoint("toy", "dummy", tokenizer="Qwen/Qwen2.5-0.5B")


def test_invalid_names_never_query_the_hub(answer_as_hub: Callable[..., None]) -> None:
    asked: list[str] = []
    answer_as_hub(lambda repository, **_: asked.append(repository) or "")
    for name in ("smollm3", "a/b/c"):
        with pytest.raises(SpecbatchError, match=r"no such name, file or folder.*smollm2-135m"):
            open_checkpoint(name)
    with pytest.raises(SpecbatchError, match=r"^model='smollm3': no such name, file or folder; give a head$"):
        open_checkpoint("smollm3", works="give a head")
    for name in ("qwen3-8b", "dummy"):
        with pytest.raises(SpecbatchError, match=f"^model='{name}': is .* only; add load_format='dummy'$"):
            open_checkpoint(name)
    with pytest.raises(SpecbatchError, match="load_format='gguf': from the hub only safetensors"):
        open_checkpoint("someone/model", "gguf")
    assert not asked


def test_snapshot_is_opened_as_a_folder(
    answer_as_hub: Callable[..., None], tiny_model: Callable[..., Any], save: Callable[..., Path]
) -> None:
    folder = save(tiny_model("qwen2"))
    requests: list[tuple[str, Any, Any]] = []

    def download(repository: str, **options: Any) -> str:
        requests.append((repository, options["revision"], options["allow_patterns"]))
        return str(folder)

    answer_as_hub(download)
    checkpoint = open_checkpoint("someone/model@abc", tokenizer="someone/tokenizer")
    assert requests[0] == ("someone/tokenizer", None, hub.TOKENIZER_FILES)
    assert requests[1] == ("someone/model", "abc", hub.MODEL_FILES)
    assert (checkpoint.name, checkpoint.origin) == ("someone/model@abc", "someone/model@abc")
    assert checkpoint.tokenizer().name == "someone/tokenizer"
