"""A tiny target on disk, its answers, and heads trained for it with the code of the command."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import crossed
import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from trained import FILES_ONLY, TRAINED

from specbatch import weights
from specbatch.cli.output import open_engine
from specbatch.config.engine_config import EngineConfig
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.training import trainer
from specbatch.training.answers import read_answers
from specbatch.training.data import Example
from specbatch.training.recipe import HEADS, Recipe
from specbatch.training.run import train_draft
from specbatch.training.source import Source
from specbatch.training.target import Target

VOCABULARY, MAX_LEN, LAYERS = 40, 48, 9
CPU = torch.device("cpu")
STEPS, LR = 24, 1e-2


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A folder and the result of the `make` that filled it, once for all test processes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    kept = folder.with_suffix(".pickle")
    with FileLock(folder.with_suffix(".lock")):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(make(folder)))
    return folder, pickle.loads(kept.read_bytes())


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "target", write_target)[0]


def write_target(folder: Path) -> None:
    """A Llama with untied embeddings and a theta that is not the default."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.8 / math.sqrt(shape[-1])
        if len(shape) > 1
        else 1 + torch.randn(shape, generator=generator) / 4
        for name, shape in tensor_shapes(ModelConfig.from_dict(config)).items()
    }
    # The next token mostly depends on the last one, in one long cycle, and sometimes on the one before it.
    embedding = tensors["model.embed_tokens.weight"] = 10 * F.normalize(tensors["model.embed_tokens.weight"])
    circle = 3 + torch.randperm(VOCABULARY - 5, generator=generator)
    tensors["lm_head.weight"][circle.roll(-1)] = embedding[circle] / 7
    save_file(tensors, folder / "model.safetensors")
    words = {f"w{index}": index for index in range(VOCABULARY - 2)}  # two rows are padding
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(6)
    rows = [torch.randint(3, VOCABULARY - 2, (3 + index % 7,), generator=generator).tolist() for index in range(70)]
    text = "".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows)
    return once(tmp_path_factory, "prompts", lambda path: path.write_text(text))[0]


@pytest.fixture(scope="session")
def train(target_folder: Path) -> Callable[..., dict[str, Any]]:
    """`train(folder, algorithm, data=..., log=..., **recipe)` runs the whole command but for its options."""

    def run(
        folder: Path,
        algorithm: str,
        *,
        data: Path | None = None,
        answers: Path | None = None,
        log: Callable[[str], None] = lambda line: None,
        report: Callable[[int, int], None] = lambda done, total: None,
        temperature: float = 0.0,
        model: Path = target_folder,
        tokenizer: str | None = None,
        limit: int | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        usual = {"steps": STEPS, "batch_tokens": 200, "max_len": MAX_LEN, "lr": LR, "held_out": 10}
        recipe = Recipe(algorithm, **usual | TRAINED[algorithm].recipe | settings)
        config = EngineConfig(
            model=str(model),
            tokenizer=tokenizer,
            device="cpu",
            max_model_len=MAX_LEN,
            max_running=8,
            page_size=4,
            seed=recipe.seed,
        )
        asked = {"data": data, "temperature": temperature, "max_new_tokens": 30}
        source = Source(limit=limit, **asked if answers is None else {"answers": answers})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "LINES", 4)
            return train_draft(
                config,
                source,
                recipe,
                folder,
                open_engine=open_engine,
                progress=lambda label, unit: nullcontext(report),
                log=log,
            )

    return run


@pytest.fixture(scope="session")
def answers_file(
    train: Callable[..., dict[str, Any]], prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder, _ = once(tmp_path_factory, "answers", lambda folder: train(folder, "eagle3", data=prompts_file, steps=1))
    return folder / "answers.jsonl"


@pytest.fixture(scope="session")
def checkpoint(target_folder: Path) -> weights.Checkpoint:
    return weights.open_checkpoint(str(target_folder))


@pytest.fixture(scope="session")
def examples(answers_file: Path, checkpoint: weights.Checkpoint) -> list[Example]:
    return read_answers(answers_file, checkpoint, MAX_LEN, print)[0]


@pytest.fixture(scope="session")
def target(checkpoint: weights.Checkpoint) -> Target:
    return Target(checkpoint, torch.float32, CPU, MAX_LEN)


@pytest.fixture(scope="session")
def trained(
    train: Callable[..., dict[str, Any]], answers_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Algorithm -> the folder of a trained head and its record."""

    def make(folder: Path) -> dict[str, Any]:
        short = FILES_ONLY if crossed.only_quick else ()
        steps = {name: {"steps": 4} if name in short else {} for name in HEADS}
        return {name: train(folder / name, name, answers=answers_file, **steps[name]) for name in HEADS}

    folder, records = once(tmp_path_factory, "heads", make)
    return {name: (folder / name, record) for name, record in records.items()}
