"""--tensor-parallel on the command line: what it prints at start, and one line for what cannot be divided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from thread_ranks import thread_group
from typer.testing import CliRunner, Result

from specbatch.cli.app import app

TOY = "--model toy --load-format dummy --max-model-len 64 --max-new-tokens 3"


def generate(folder: Path, options: str) -> Result:
    (folder / "in.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    return CliRunner().invoke(app, f"generate {folder}/in.jsonl -o {folder}/out.jsonl {TOY} {options}".split())


def test_memory_plan_is_that_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread_group(monkeypatch)
    result = generate(tmp_path, "--tensor-parallel 2 --device cpu")
    assert result.exit_code == 0, result.output
    assert "\nmemory budget of each of 2 ranks: " in result.stderr
    assert result.stderr.count("memory budget") == 1
    assert "\ntensor_parallel=2: on a CPU, ranks exchange tensors through gloo, which is slow" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--tensor-parallel 3 --device cpu",
            "3: it must divide num_key_value_heads=2, or be a multiple of it; use 2 or 4",
        ),
        ("--tensor-parallel 16 --device cpu", "16: it must divide num_attention_heads=4; use 2 or 4"),
        (
            "--tensor-parallel 2 --device cpu --algorithm eagle --draft {tmp}/config.json",
            "2: for the draft, it must divide num_attention_heads=3; this model runs on one device only",
        ),
        ("--tensor-parallel 4 --device cuda", "4: this machine has 2 CUDA devices; use at most that"),
        (
            "--tensor-parallel 2 --device cuda",
            "2: cuda:1 cannot access the memory of cuda:0; use GPUs that are connected by NVLink, or --data-parallel",
        ),
    ],
)
def test_sizes_that_do_not_work_are_refused(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    message: str,
) -> None:
    if "cuda" in options:
        request.getfixturevalue("use_gpus")(2)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: first < second)
    head = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(head))
    result = generate(tmp_path, options.replace("{tmp}", str(tmp_path)))
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1] == f"error: --tensor-parallel={message}"
    assert result.stdout == ""
    assert not (tmp_path / "out.jsonl").exists()
