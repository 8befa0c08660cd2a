"""`specbatch lm-eval`: lm-eval's command with this engine as a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval.__main__
import lm_eval.tasks
import pytest
import torch
from checkpoints import TINY, write_folder
from torch.utils import collect_env
from typer.testing import CliRunner, Result

from specbatch.cli import lm_eval_model
from specbatch.cli.app import app
from specbatch.evals import few_shot
from specbatch.sweeps.report.compare import compare

TASKS = Path(few_shot.__file__).parent / "tasks"
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny", TINY | {"max_position_embeddings": 1024})


@pytest.fixture(scope="module")
def run(model: Path) -> Iterator[Run]:
    """`run(model_args, *options, exit_code=0)`, with the tasks of this package alone: lm-eval reads its 14,000 files in
    ten seconds."""
    manager = lm_eval.tasks.TaskManager

    def own(include_path: Any = None, metadata: Any = None, **_: Any) -> Any:
        folders = [TASKS, Path(lm_eval.tasks.__file__).parent / "gsm8k_platinum"]
        return manager(include_path=folders, include_defaults=False, metadata=metadata)

    def call(
        model_args: str, *options: object, exit_code: int = 0, name: str = "specbatch", device: str = "cpu"
    ) -> Result:
        words = ["--model", name, "--model_args", model_args, "--device", device, *map(str, options)]
        if "--tasks" not in words:
            words += ["--tasks", "one_digit_sums"]
        if "--samples" not in words:
            words += ["--limit", "2"]
        result = CliRunner().invoke(app, ["lm-eval", *words], env={"COLUMNS": "1000"})
        assert result.exit_code == exit_code, result.output
        assert lm_eval_model.SpecBatchModel._kept is None
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", own)
        patch.setattr(lm_eval.__main__, "setup_logging", lambda: None)
        patch.setattr(collect_env, "get_pretty_env_info", lambda: "")  # seven processes
        patch.setattr(sys, "argv", ["pytest"])
        yield call


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations of the engines that are built."""
    found, before = [], lm_eval_model.open_replicas
    monkeypatch.setattr(lm_eval_model, "open_replicas", lambda config: found.append(config) or before(config))
    return found


@pytest.fixture(scope="module")
def made(run: Run, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run of two tasks with its folder."""
    folder = tmp_path_factory.mktemp("files")
    words = ("--tasks", "one_digit_sums,one_digit_choices", "--output_path", folder, "--log_samples")
    return run(f"pretrained={model},spec=v2,num_concurrent=8", *words), folder


def results_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def refused(result: Result) -> str:
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.output
    return line.removeprefix("error: ")


def test_tables_of_lm_eval_and_speed(made):
    result, folder = made
    assert "specbatch ({'pretrained': " in result.stdout
    assert "|one_digit_sums   |      1|flexible-extract|     5|exact_match|" in result.stdout
    assert "|one_digit_choices|" in result.stdout
    assert "| requests   | accept length   |" in result.stdout
    results = results_of(folder)
    assert results["model_source"] == "specbatch"
    assert results["config"]["model_dtype"] == "torch.float32"
    assert results["config"]["accept_length"] >= 1
    assert results["config"]["output_throughput"] > 0
    assert results["tokenizer_eos_token"] == ["<|im_end|>", "257"]
    assert results["eot_token_id"] == 257
    assert results["max_length"] == 1024
    assert sys.argv == ["pytest"]


def test_answers_and_keys_are_those_of_eval(made, model, tmp_path):
    _, folder = made
    words = ["eval", "one_digit_sums", "--limit", "2", "--model", str(model), "--device", "cpu", "--spec", "v2"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "eval")])
    assert result.exit_code == 0, result.output
    found = compare(tmp_path / "eval", folder)
    assert {row.over for row in found.rows} == {"2 questions, paired: 0 lost, 0 gained, p = 1"}
    theirs, ours = results_of(folder), results_of(tmp_path / "eval")
    assert set(ours) == set(theirs)
    for name in theirs.keys() - {"git_hash", "upper_git_hash"}:
        assert type(ours[name]) is type(theirs[name]), name
    assert set(theirs["config"]) - {"scored_tokens"} <= set(ours["config"])
    assert ours["task_hashes"]["one_digit_sums"] == theirs["task_hashes"]["one_digit_sums"]
    samples = [
        [json.loads(line) for line in next(place.rglob("samples_one_digit_sums_*")).read_text().splitlines()]
        for place in (folder, tmp_path / "eval")
    ]
    assert samples[0] == samples[1]


def test_options_of_the_engine_and_of_answers(run, model, built):
    words = ("--batch_size", "4", "--trust_remote_code", "--gen_kwargs", "max_gen_toks=3")
    run(f"model={model},max_length=512,algorithm=ngram,draft_tokens=2,dtype=float32,prefix_cache=false", *words)
    (config,) = built
    assert (config.model, config.max_model_len, config.max_running) == (str(model), 512, 4)
    assert (config.speculation.algorithm, config.speculation.num_drafts) == ("ngram", 2)
    assert config.prefix_cache is False
    assert config.device == "cpu"


def test_gsm8k_needs_no_network(run, model, no_hub):
    found = run(f"model={model},num_concurrent=512,max_gen_toks=4", "--tasks", "gsm8k_platinum", "--num_fewshot", "0")
    assert "|gsm8k_platinum|      3|flexible-extract|     0|exact_match|" in found.stdout


def test_device_and_seed_of_lm_eval(run, model, built):
    run(f"pretrained={model}", "--seed", "7", device="cuda:0")  # lm-eval's default, also without a GPU
    run(f"pretrained={model},seed=3", "--seed", "7")
    assert [(config.device, config.seed) for config in built] == [("auto", 7), ("cpu", 3)]


def test_python_values(model):
    made = lm_eval_model.SpecBatchModel(pretrained=model, device=torch.device("cpu"), dtype=torch.float32)
    assert (made.record().config["model"], made.record().config["dtype"]) == (str(model), "float32")
    made.close()


def test_a_limit_where_the_task_has_none(model):
    made = lm_eval_model.SpecBatchModel(pretrained=str(model), device="cpu", max_gen_toks=5, batch_size=1)
    assert made._generation({"until": []}).params["max_new_tokens"] == 5
    assert made._generation({"until": [], "max_gen_toks": 7}).params["max_new_tokens"] == 7
    assert made.max_length == 1024
    made.close()
    made.close()  # nothing is left to close


def test_an_engine_is_closed_with_its_model(model):
    made = lm_eval_model.SpecBatchModel(pretrained=str(model), device="cpu")
    engine = made._engine
    del made
    assert engine._state == "closed"


def test_chat(run, model, tmp_path):
    words = ("--output_path", tmp_path, "--log_samples", "--apply_chat_template", "--num_fewshot", "1")
    run(f"pretrained={model}", *words, "--system_instruction", "Count.")
    results = results_of(tmp_path)
    assert "<|im_start|>" in results["chat_template"]
    assert results["system_instruction"] == "Count."
    row = json.loads(next(tmp_path.rglob("samples_*")).read_text().splitlines()[0])
    assert row["arguments"]["gen_args_0"]["arg_0"].startswith("<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user")


def test_cached_answers_are_not_generated_again(run, model, tmp_path):
    words = ("--use_cache", tmp_path / "cache", "--apply_chat_template")
    first = run(f"pretrained={model}", *words)
    again = run(f"pretrained={model}", *words)
    assert "| 2          |" in first.stdout
    assert "| 0          |" in again.stdout
    assert again.stdout.partition("| requests")[0] == first.stdout.partition("| requests")[0]


@pytest.mark.parametrize(
    ("model_args", "says"),
    [
        ("model=m,base_url=http://127.0.0.1:30000/v1/completions,num_concurrent=512",
         "base_url='http://127.0.0.1:30000/v1/completions': the engine runs in this process and needs no server; leave "
         "it out, or use --model local-completions"),
        ("pretrained=m,draft_token=3", "model_args='draft_token': is no argument of specbatch; did you mean draft_t"),
        ("pretrained=m,model=n", "model='n': model is given twice, also as 'm'; leave one of them out"),
        ("pretrained=m,dtype=[1.5]", "dtype='1.5': use "),
        ("pretrained=m,prefix_cache=3", "model_args='prefix_cache=3': use true or false"),
        ("pretrained=m,num_concurrent=many", "num_concurrent='many': use a whole number"),
        ("pretrained=m,num_concurrent=0", "concurrency=0: use a whole number of at least 1"),
        ("pretrained=m,add_bos_token=1", "add_bos_token=1: use true or false"),
        ("pretrained=no-such-model", "model='no-such-model': "),
        ("pretrained=m,spec=v3", "spec='v3': use one of off, v1, v2"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(model_args, says, run):
    assert says in refused(run(model_args, exit_code=2))


def test_mistakes_in_arguments_of_lm_eval_are_one_line(run):
    assert refused(run("model=m", "--tasks", "no_such", exit_code=2)) == "lm-eval: Tasks not found: no_such"
    wrong = run("model=m,max_length=abc", exit_code=2)
    assert refused(wrong) == "model_args='max_length=abc': this is not a value of that option"
    says = "lm-eval: Attempted to load model 'specbtch', but no model for this name found!"
    assert refused(run("model=m", exit_code=2, name="specbtch")).startswith(says)


def test_an_error_of_lm_eval_after_the_model_is_built(run, model):
    outside = run(f"model={model}", "--samples", '{"one_digit_sums": [9999]}', exit_code=2)
    assert refused(outside).startswith("lm-eval: Elements of --samples should be in the interval [0,k-1]")


def test_a_file_that_is_no_yaml(run, tmp_path):
    (tmp_path / "bad.yaml").write_text("task: bad\n  x: 1\n")
    assert "mapping values are not allowed" in refused(run("model=m", "--tasks", tmp_path / "bad.yaml", exit_code=2))


def test_a_fault_of_the_engine_is_not_blamed_on_lm_eval(run, model, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(lm_eval_model.SpecBatchLM, "generate_until", fail)
    assert isinstance(run(f"model={model}", exit_code=1).exception, ValueError)


def test_one_import_registers_the_model(model):
    from lm_eval.api.registry import get_model

    assert get_model("specbatch") is lm_eval_model.SpecBatchModel
    manager = lm_eval.tasks.TaskManager(include_path=TASKS, include_defaults=False)
    found = lm_eval.simple_evaluate(
        "specbatch",
        f"pretrained={model},device=cpu",
        ["one_digit_choices"],
        limit=2,
        task_manager=manager,
        batch_size=1,
    )
    assert found["n-samples"]["one_digit_choices"]["effective"] == 2


def test_batch_sizes(run, model):
    both = run(f"pretrained={model},num_concurrent=3", "--batch_size", "4", exit_code=2)
    works = "differs from num_concurrent=3, which means the same here; leave one of them out"
    assert refused(both) == f"batch_size='4': {works}"
    assert "use a whole number of at least 1, or auto" in refused(run("model=m", "--batch_size", "x", exit_code=2))


def test_thinking_needs_the_chat_template(run, model):
    says = "enable_thinking=True: is a switch of the chat template; add --apply_chat_template"
    assert refused(run(f"pretrained={model},enable_thinking=true", exit_code=2)) == says


def test_help():
    result = CliRunner().invoke(app, ["lm-eval", "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert "--model specbatch" in result.stdout


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("words", [["run", "--help"], ["--model", "specbatch", "--help"]])
def test_help_of_lm_eval(words):
    result = CliRunner().invoke(app, ["lm-eval", *words])
    assert result.exit_code == 0
    assert "--wandb_args" in result.stdout
