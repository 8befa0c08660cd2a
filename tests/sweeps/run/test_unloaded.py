"""What does not fit is refused before any engine is loaded, for several models, devices, lengths and tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY, write_folder
from typer.testing import CliRunner, Result

from specbatch.cli.app import app
from specbatch.cli.eval_grid import compare
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.evals.options import EvalOptions, GridOptions
from specbatch.replicas.cluster import Cluster
from specbatch.sweeps.run.benchmark import Benchmark, SweepOptions
from specbatch.sweeps.run.engine_groups import Failed
from specbatch.sweeps.run.runner import left_of
from specbatch.sweeps.run.unloaded import check_early
from specbatch.sweeps.workload.workloads import Workload
from specbatch.weights.folder import FolderCheckpoint

WORDS = "--device cpu --concurrency 1,2 --repeats 1 --prompts-per-concurrency 1 --least-prompts 2 --out out"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """`refused(command)`: standard error of a command that loads and writes nothing. Models: long, which has 512
    positions, and short, which has 64. Files: in.jsonl with a prompt of 100 tokens at the end, and text."""

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("an engine is loaded, or a process started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specbatch.replicas.engine.engine_of", fail)
    monkeypatch.setattr("specbatch.progress.bars.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("specbatch.sweeps.run.process.run_in_process", fail)
    write_folder(tmp_path / "long", TINY | {"max_position_embeddings": 512})
    write_folder(tmp_path / "short", TINY | {"max_position_embeddings": 64})
    rows = [{"prompt_token_ids": [5] * 9}, {"prompt_token_ids": [5] * 100}]
    (tmp_path / "text").mkdir()
    (tmp_path / "text/README").write_text("abc " * 10)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(command: str) -> str:
        found: Result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "1000"})
        assert found.exit_code == 2, found.output
        assert not Path("out").exists()
        return found.stderr

    return call


def write_grid(text: str) -> None:
    Path("grid.toml").write_text(text)


SHORT_DRAFT = '[baseline]\nspec = "off"\n[draft]\nalgorithm = "standalone"\ndraft = "short"\n'


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--configs baseline --dataset in.jsonl", "the prompt has 100 tokens and --max-model-len=64"),
        (
            "--input-len 80 --configs baseline",
            "--input-len=80: with --output-len=4 that is --max-model-len=84: the model",
        ),
        ("--input-len 40 --kv-pages 2 --configs v1", "--max-model-len=44: the KV pool of 2 pages holds requests of "),
        ("--dataset documents:text --input-len 30 --configs v1", "text has text for 0 prompts of 30 tokens, not 2"),
    ],
)
def test_a_sweep_of_several_models(refused: Callable[[str], str], words: str, reason: str) -> None:
    found = refused(f"sweep --model long,short --output-len 4 {words} {WORDS}")
    assert reason in found
    name = "long" if "KV pool" in reason or "text" in words else "short"
    assert f"{name} cannot run; nothing has begun" in found
    assert ("tokenizing prompts: 2/2 prompts, " in found) == ("in.jsonl" in words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--dataset in.jsonl", "the prompt has 100 tokens and max-model-len=64"),
        ("--input-len 80", "max-model-len=84: the model supports at most 64"),
    ],
)
def test_a_draft_of_one_of_several_models(refused: Callable[[str], str], words: str, reason: str) -> None:
    write_grid(
        SHORT_DRAFT.replace("spec =", 'model = ["long", "other"]\nspec =').replace(
            "draft =", 'model = "other"\ndraft ='
        )
    )
    write_folder(Path("other"), TINY | {"max_position_embeddings": 256})
    found = refused(f"sweep --configs grid.toml --output-len 4 {words} {WORDS}")
    assert "other cannot run; nothing has begun" in found
    assert reason.replace("max-model-len", "--max-model-len") in found


def test_a_configuration_of_one_of_several_models_is_named(refused: Callable[[str], str]) -> None:
    write_grid(
        SHORT_DRAFT.replace("spec =", 'model = ["long", "other"]\nspec =').replace("draft =", 'model = "long"\ndraft =')
    )
    write_folder(Path("other"), TINY | {"max_position_embeddings": 256})
    found = refused(f"sweep --configs grid.toml --output-len 4 --dataset in.jsonl {WORDS}")
    assert "error: --configs='grid.toml: draft': max_new_tokens of prompt 1=4: the prompt has 100 tokens" in found


def test_finished_models_are_not_checked(refused: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = SweepOptions(
        (1,), workload=Workload("in.jsonl", output_len=4, prompts_per_concurrency=1, least_prompts=2)
    )
    configs, works = {"v2": EngineConfig(model="short", device="cpu")}, {Path("out"): Benchmark(options)}
    with pytest.raises(SpecbatchError, match="the prompt has 100 tokens"):
        check_early(configs, left_of(configs, works), Failed())
    monkeypatch.setattr("specbatch.sweeps.run.runner.is_measured", lambda point, folder: True)
    assert left_of(configs, works) == []
    assert check_early(configs, [], Failed()) == {}


@pytest.mark.parametrize("command", ["sweep --dataset in.jsonl --repeats 1", "eval gsm8k --num-fewshot 0 --limit 1"])
def test_one_of_several_configurations_of_a_model_does_not_end_the_others(
    refused: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It is said before the first model runs."""
    begun = list[str]()

    def run_in_process(run: Any, folder: Path, **_: Any) -> int:
        begun.append(folder.name)
        return 0

    monkeypatch.setattr("specbatch.sweeps.run.process.run_in_process", run_in_process)
    write_grid(SHORT_DRAFT + '[ngram]\nalgorithm = "ngram"\n[bad]\nalgorithm = "eagle3"\ndraft = "nowhere"\n')
    lengths = "--max-new-tokens 4" if "eval" in command else "--output-len 4 --prompts-per-concurrency 2"
    words = f"{command} --model long,other --configs grid.toml --device cpu --concurrency 1 {lengths} --out out"
    write_folder(Path("other"), TINY | {"max_position_embeddings": 512})
    lines = CliRunner().invoke(app, words.split(), env={"COLUMNS": "1000"}).stderr.splitlines()
    assert begun == ["long", "other"]
    for model in begun:
        at = lines.index(f"{model}:")
        short, bad = (line for line in lines[:at] if line.startswith(f"{model}: "))
        assert bad.startswith(f"{model}: bad: draft='nowhere': no such folder")
        assert short.startswith(f"{model}: draft: ")
        assert "max-model-len=64" in short


def test_a_model_without_a_chat_template(refused: Callable[[str], str]) -> None:
    described = json.loads(Path("short/tokenizer_config.json").read_text())
    del described["chat_template"]
    Path("short/tokenizer_config.json").write_text(json.dumps(described))
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    command = f"sweep --model long,short --output-len 4 --dataset in.jsonl --chat-template --configs v1 {WORDS}"
    assert "--chat-template: short has none; use --no-chat-template" in refused(command)


@pytest.mark.parametrize("values", ["[1, 2]", "[2, 1]"])
def test_prompts_that_no_number_of_devices_can_run(refused: Callable[[str], str], values: str) -> None:
    write_grid(f'[one]\nspec = "off"\ntensor-parallel = {values}\n')
    found = refused(f"sweep --model short --configs grid.toml --output-len 4 --dataset in.jsonl {WORDS}")
    assert "the prompt has 100 tokens and --max-model-len=64" in found
    assert "tokenizing prompts: 2/2 requests, " in found


def test_what_one_configuration_cannot_run_is_logged_and_it_is_not_built(refused: Callable[[str], str]) -> None:
    base = EngineConfig(model="long", device="cpu", speculation=Speculation(algorithm="none", schedule="v2"))
    drafts = replace(base, tensor_parallel=2, speculation=Speculation("standalone", draft="short"))
    ngram = replace(base, speculation=Speculation("ngram"))
    options = SweepOptions((1, 2), workload=Workload("in.jsonl", output_len=4, prompts_per_concurrency=1))
    failed, lines = Failed(), list[str]()
    configs = options.fitted(
        {
            "base": base,
            "ngram": ngram,
            "drafts": drafts,
            "pages": replace(base, kv_pages=2),
            "full": replace(ngram, kv_pages=9),
            "long": replace(drafts, max_model_len=90),
        }
    )
    assert {*check_early(configs, [Benchmark(options)], failed, log=lines.append)} == {"base", "ngram", "full"}
    assert {*failed} == {"drafts", "pages", "long"}, "full may run a point at concurrency 1"
    of_prompt = "max_new_tokens of prompt 1=4"
    reasons = f"drafts: {of_prompt}", f"pages: {of_prompt}", "full: concurrency=2: ", "long: max_model_len=90: the "
    assert all(line.startswith(reason) for line, reason in zip(lines, reasons, strict=True)), lines


def test_one_of_several_lengths(refused: Callable[[str], str]) -> None:
    lengths = f"sweep --model long --output-len 4 --input-len 8,40 --configs baseline,v1 {WORDS}"
    assert "--max-model-len=44: the KV pool of 2 pages" in refused(f"{lengths} --kv-pages 2")
    model = lengths.replace("8,40", "8,600")
    assert "--input-len=600: with --output-len=4 that is --max-model-len=604: the model supports" in refused(model)


EVAL = "--num-fewshot 0 --max-new-tokens 4 --limit 1 --device cpu --out out"


@pytest.mark.parametrize(
    ("command", "longest"),
    [
        ("eval one_digit_sums gsm8k --model middle", 128),  # the first task fits
        ("eval one_digit_sums gsm8k --model middle --configs baseline,v1 --concurrency 1", 128),
        ("eval gsm8k --model long,short --configs v1 --concurrency 1", 64),
        ("eval gsm8k --model long --configs grid.toml --concurrency 1", 64),
    ],
)
def test_questions_that_do_not_fit(refused: Callable[[str], str], command: str, longest: int) -> None:
    write_folder(Path("middle"), TINY | {"max_position_embeddings": 128})
    write_grid(SHORT_DRAFT)
    assert f"--max-model-len={longest}: question 0 of gsm8k, the longest, has " in refused(f"{command} {EVAL}")


def test_tokenizers_are_loaded_once(refused: Callable[[str], str], watch: Any) -> None:
    """Of a large vocabulary each takes up to a second."""
    loaded = watch(FolderCheckpoint, "tokenizer", after=lambda *_: None)
    Path("in.jsonl").write_text('{"prompt": "a"}\n' * 2)
    config = EngineConfig(model="short", device="cpu")
    configs = {f"pages {pages}": replace(config, page_size=pages, max_running=1) for pages in (4, 8, 16)}
    options = SweepOptions((1,), workload=Workload("in.jsonl", output_len=4, prompts_per_concurrency=1))
    check_early(configs, [Benchmark(options)], Failed())
    assert len(loaded) == 1


def grid_options() -> GridOptions:
    return GridOptions(EvalOptions("gsm8k", num_fewshot=0, max_new_tokens=4, limit=1), (1,))


def test_models_of_an_evaluation_that_are_finished_are_not_checked(
    refused: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[Path]()

    def run_in_process(run: Any, folder: Path, **_: Any) -> int:
        begun.append(folder)
        return 0

    monkeypatch.setattr("specbatch.sweeps.run.runner.is_measured", lambda point, folder: folder.name == "gone")
    monkeypatch.setattr("specbatch.sweeps.run.process.run_in_process", run_in_process)
    models: dict[str, Any] = {name: {"v2": EngineConfig(model=name, device="cpu")} for name in ("gone", "short")}
    with pytest.raises(SpecbatchError, match="max_model_len=64: question 0 of gsm8k"):
        compare(models, {}, grid_options(), Path("out"), None)
    models["short"]["v2"] = EngineConfig(model="long", device="cpu")
    compare(models, {}, grid_options(), Path("out"), None)
    assert begun == [Path("out/gone"), Path("out/short")]


def test_models_of_other_machines_need_not_be_on_this_one(
    refused: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening one would download it."""
    models: dict[str, Any] = {name: {"v2": EngineConfig(model=name, device="cpu")} for name in ("a", "b")}
    monkeypatch.setattr("specbatch.sweeps.run.process.run_in_process", lambda run, folder, **_: 0)
    compare(models, {}, grid_options(), Path("out"), Cluster(least=1, most=1))
    with pytest.raises(SpecbatchError, match="model='a'"):
        compare(models, {}, grid_options(), Path("out"), None)
