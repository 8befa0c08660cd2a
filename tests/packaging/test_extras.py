"""`pip install .` has what the commands import, `generate` imports little of it, and a missing extra is named."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from named_in import imports_of, sources
from packaging.requirements import Requirement
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from specbatch.cli.app import app
from specbatch.errors import SpecbatchError
from specbatch.extras import EXTRAS, missing, needs
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"lm-eval": "lm_eval", "reasoning-gym": "reasoning_gym", "pyyaml": "yaml"}  # distributions with another name
EXTRA_MODULES = {module for modules in EXTRAS.values() for module in modules}
OF_OTHERS = {"pyarrow", "pydantic_core", "click", "triton"}  # come with torch, typer, ...
OPTIONAL = EXTRA_MODULES | {
    *("datasets", "evaluate", "lm_eval", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "triton"),
}  # what `generate` does not import
RUN_WITHOUT = """
import json, sys
sys.modules.update(dict.fromkeys({blocked!r}))  # as if they were not installed, for find_spec, too
from specbatch.cli.app import app
from typer.testing import CliRunner
found = []
for words in {commands!r}:
    if words[0] == "doctor":
        from specbatch.engine import support
        support.FAMILIES = {{"Llama": "llama-3.2-1b"}}
        support.SETTINGS = dict(list(support.SETTINGS.items())[:1])
    result = CliRunner().invoke(app, words)
    heavy = sorted({{"transformers", "torch._dynamo", "sympy", "gguf"}} & set(sys.modules))
    found.append([result.exit_code, result.stdout, result.stderr, heavy, len(sys.modules)])
print(json.dumps(found))
"""


def run(folder: Path, *commands: str) -> list[tuple[int, str, str, list[str], int]]:
    """Commands in a process that cannot import the optional packages: exit status, both outputs, some heavy
    modules that are imported so far, and the number of all."""
    code = RUN_WITHOUT.format(blocked=OPTIONAL, commands=[command.split() for command in commands])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama in a folder, with a byte-level tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "eos_token_id": 256, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(ModelConfig.from_dict(config))
    generator = torch.Generator().manual_seed(0)  # of whose tokens none is the end
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)} | {"<e>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"}')
    return folder


@pytest.mark.slow
def test_generate_and_its_like_import_no_package_for_tables_and_evaluations(model, tmp_path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello"}\n{"prompt_token_ids": [5, 6]}\n')
    words = "--model model --device cpu --max-new-tokens 5 --algorithm ngram"
    found = run(
        tmp_path,
        f"generate in.jsonl -o out.jsonl {words}",
        f"send-one {words}",
        "models list",
        "doctor --json",
        "sweep --help",
    )
    for status, _, errors, _, _ in found:
        assert status == 0, errors
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(row["token_ids"]) for row in rows] == [5, 5]
    _, _, _, heavy, count = found[0]
    assert heavy == [], "imported when they are needed"
    assert count < 1720, "torch has about 1,100 of these modules"
    assert "pip install 'specbatch[http]'" in found[3][1]


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("sweep --engine http --base-url http://127.0.0.1:9 --output out", "http"),
        ("generate in.jsonl -o out.jsonl --distributed ray --workers 1 --device cpu", "ray"),
        ("eval reasoning_gym:chain_sum --output out", "reasoning"),
    ],
)
def test_missing_extra_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_packages: Callable[..., None], command: str, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    use_packages(dict.fromkeys(EXTRA_MODULES))
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(rf"error: .*[a-z_, ]+ not installed; pip install 'specbatch\[{extra}\]'", line)
    assert not list(tmp_path.iterdir())


def test_http_extra_is_named(use_packages: Callable[..., None]) -> None:
    use_packages({"aiohttp": None})
    with pytest.raises(SpecbatchError, match=r"^aiohttp not installed; pip install 'specbatch\[http\]'$"):
        needs("http")
    assert missing("http") is not None


def test_modules_of_extras_are_those_of_pyproject() -> None:
    extras = PROJECT["optional-dependencies"]
    for extra, checked in EXTRAS.items():
        assert set(checked) == {MODULES.get(name, name) for name in map(name_of, extras[extra])}
    assert [name_of(text) for text in extras["all"]] == ["specbatch", "triton"]
    assert Requirement(extras["all"][0]).extras == {"http"}
    assert [extras[name] for name in ("data", "eval", "report")] == [[], [], []]


def test_every_import_is_a_dependency_or_of_an_extra() -> None:
    """So that `pip install .` runs every command that names no extra."""
    installed = {MODULES.get(name, name) for name in map(name_of, PROJECT["dependencies"])}
    known = sys.stdlib_module_names | installed | EXTRA_MODULES | OF_OTHERS | {"specbatch", "xllamacpp"}  # a benchmark
    for path in sources():
        for node in imports_of(path):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert {name.split(".")[0] for name in names} <= known, path


def name_of(requirement: str) -> str:
    return Requirement(requirement).name
