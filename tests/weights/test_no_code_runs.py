"""Nothing from a checkpoint, a data set or a task file runs: each has code that would create a file, the canary."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from checkpoints import TINY, Field, gguf_bytes, metadata, write_folder
from gguf.constants import GGUFValueType

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.jobs.dataset import read_rows
from specbatch.models.config import ModelConfig
from specbatch.text.tokenizer import Tokenizer
from specbatch.weights import open_checkpoint
from specbatch.weights.draft_heads import open_draft
from specbatch.weights.opening import open_tokenizer

pytestmark = pytest.mark.usefixtures("template_processes")

AUTO_MAP = {
    "AutoConfig": "canary.Config",
    "AutoModel": "canary.Model",
    "AutoModelForCausalLM": "canary.Model",
    "AutoTokenizer": ["canary.Slow", "canary.Fast"],
}


class Canary:
    """Code that creates a file where it runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = f"open({str(path)!r}, 'w').close()\nclass Slow: pass\nFast = Config = Model = f = Slow\n"

    def __reduce__(self) -> tuple[Any, ...]:  # what a pickle of it calls
        return os.mkdir, (str(self.path),)

    def plant(self, folder: Path) -> Path:
        """The same folder with the code in it, and named by its configurations."""
        (folder / "canary.py").write_text(self.source)
        for name in ("config.json", "tokenizer_config.json"):
            if (folder / name).exists():
                found = json.loads((folder / name).read_text())
                (folder / name).write_text(json.dumps(found | {"auto_map": AUTO_MAP}))
        return folder


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Standard input confirms every question of a library."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    found = Canary(tmp_path / "canary")
    yield found
    assert not found.path.exists()


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """Put a folder into an offline cache of the hub, as it stores downloads; returns its id."""
    cache, revision = tmp_path / "hub", "0" * 40
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def store(folder: Path) -> str:
        root = cache / f"models--someone--{folder.name}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text(revision)
        (root / "snapshots" / revision).mkdir(parents=True)
        (root / "blobs").mkdir()
        for number, path in enumerate(folder.iterdir()):
            path.rename(root / "blobs" / str(number))
            (root / "snapshots" / revision / path.name).symlink_to(f"../../blobs/{number}")
        return f"someone/{folder.name}"

    return store


def slow_tokenizer(folder: Path, kind: str | None) -> Path:
    """A folder without tokenizer.json."""
    described = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(described["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in described["merges"]))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} if kind else {}))
    return folder


def opens_or_refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except SpecbatchError:
        return False
    return True


def test_the_canaries_can_be_found_dead(tmp_path: Path) -> None:
    for number, run in enumerate(
        (
            lambda found, path: runpy.run_path(str(found.plant(path) / "canary.py")),
            lambda found, path: pickle.loads(pickle.dumps(found)),
        )
    ):
        found, folder = Canary(tmp_path / f"canary{number}"), tmp_path / f"folder{number}"
        folder.mkdir()
        run(found, folder)
        assert found.path.exists()


@pytest.mark.parametrize("kind", ["Slow", "GPT2Tokenizer", None])
def test_tokenizers(kind: str | None, tmp_path: Path, canary: Canary, on_hub: Callable[[Path], str]) -> None:
    folder = canary.plant(slow_tokenizer(write_folder(tmp_path / "model"), kind))
    opened = opens_or_refuses(lambda: Tokenizer.from_folder(folder).encode("abc"))
    assert opened == (kind == "GPT2Tokenizer")
    opens_or_refuses(lambda: open_tokenizer(str(folder)).encode("abc"))
    name = on_hub(folder)
    opens_or_refuses(lambda: open_tokenizer(name).encode("abc"))


@pytest.mark.parametrize("model_type", ["llama", "canary"])
def test_targets(model_type: str, tmp_path: Path, canary: Canary, on_hub: Callable[[Path], str]) -> None:
    folder = canary.plant(write_folder(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    for load_format in ("auto", "dummy"):
        opened = opens_or_refuses(lambda: open_checkpoint(str(folder), load_format).tokenizer().encode("abc"))  # noqa: B023
        assert opened == (model_type == "llama")
    name = on_hub(folder)
    assert opens_or_refuses(lambda: open_checkpoint(name).tokenizer().encode("abc")) == (model_type == "llama")


def test_links_to_blobs_in_the_cache_of_the_hub_are_followed(tmp_path: Path, on_hub: Callable[[Path], str]) -> None:
    assert open_checkpoint(on_hub(write_folder(tmp_path / "model"))).tokenizer().encode("abc")


def test_drafts(tmp_path: Path, canary: Canary, on_hub: Callable[[Path], str]) -> None:
    folder = canary.plant(write_folder(tmp_path / "draft"))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": canary}))
    reason = r"pytorch_model.bin': it is damaged or not a file of tensors"
    with pytest.raises(SpecbatchError, match=reason):
        open_draft(str(folder))
    name = on_hub(folder)
    with pytest.raises(SpecbatchError, match=reason):
        open_draft(name)


def test_draft_models(tmp_path: Path, canary: Canary) -> None:
    from specbatch.engine.setup.prepare import prepare

    target = canary.plant(write_folder(tmp_path / "target"))
    draft = canary.plant(write_folder(tmp_path / "draft"))
    speculation = Speculation(algorithm="standalone", draft=str(draft))
    config = EngineConfig(model=str(target), speculation=speculation, device="cpu")
    assert prepare(config, lambda line: None).draft is not None


def test_configs_with_code_are_data(canary: Canary) -> None:
    assert ModelConfig.from_dict(TINY | {"auto_map": AUTO_MAP}) == ModelConfig.from_dict(TINY)


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for c in ().__class__.__base__.__subclasses__() %}{{ c('CANARY') }}{% endfor %}",
        "{{ lipsum.__globals__['os'].mkdir('CANARY') }}",
        "{{ namespace.__init__.__globals__['__builtins__'].open('CANARY', 'w') }}",
        "{% import 'os' as os %}{{ os.mkdir('CANARY') }}",
        "{{ ('%s' | format('')).__class__ }}{{ joiner.__init__.__builtins__.open('CANARY', 'w') }}",
    ],
)
def test_chat_templates_of_gguf_files(template: str, tmp_path: Path, canary: Canary, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    field = Field(GGUFValueType.STRING, None, template.replace("CANARY", str(canary.path)))
    path.write_bytes(gguf_bytes(metadata() | {"tokenizer.chat_template": field}))
    tokenizer = open_checkpoint(str(path)).tokenizer()
    with pytest.raises(SpecbatchError, match="chat_template="):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_data_sets_with_a_script(
    tmp_path: Path, canary: Canary, on_hub: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(canary.source)
    monkeypatch.chdir(tmp_path)
    for source, split in ((folder, None), (folder / "data.py", None), ("hf:data", "test"), ("hf:./data", "test")):
        with pytest.raises(SpecbatchError):
            list(read_rows("input", source, split, ("prompt",)))
    with pytest.raises(SpecbatchError):
        list(read_rows("input", f"hf:{on_hub(folder)}", "test", ("prompt",)))


def test_python_of_task_files_is_not_run(tmp_path: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's `!function` tags import Python files; without include_path a file is found by its path only."""
    import lm_eval.tasks

    from specbatch.evals.task import load_task

    quick = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)  # reading all tasks takes 10 seconds
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)
    (tmp_path / "canary.py").write_text(canary.source)
    (tmp_path / "mine.yaml").write_text("task: mine\noutput_type: generate_until\nprocess_docs: !function canary.f\n")
    monkeypatch.chdir(tmp_path)
    for name in ("mine", str(tmp_path)):
        with pytest.raises(SpecbatchError, match="no such task"):
            load_task(name)
    for name, folders in (("mine.yaml", ()), (str(tmp_path / "mine.yaml"), ()), ("mine", (tmp_path,))):
        with pytest.raises(SpecbatchError, match="would run Python, which is off"):
            load_task(name, include_path=folders)
