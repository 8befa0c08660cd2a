"""Tasks that score given texts: log-likelihoods and results match lm-eval's own model for transformers; rows, reports,
refusals, `compare` and `gate`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import lm_eval.tasks
import pytest
import tokenizers
import torch
import transformers as hf
from lm_eval.api.instance import Instance

from specbatch import Engine, EngineConfig, Graphs, SpecbatchError, Speculation
from specbatch.evals.gate.gate import run_gate
from specbatch.evals.grid import run_grids
from specbatch.evals.lm import SpecBatchLM
from specbatch.evals.options import GridOptions
from specbatch.evals.report import EvalReport
from specbatch.evals.run import EvalOptions, prepare, run_eval
from specbatch.sweeps.report.compare import compare

LONGEST = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": LONGEST, "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MODELS: dict[str, Callable[[int], Any]] = {
    "llama": lambda size: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=size, **SIZES)),
    "qwen3.5": lambda size: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(vocab_size=size, **SIZES, **DELTA)),
}
TASK = """
task: {name}
output_type: {kind}
custom_dataset: !function rows.splits
test_split: test
doc_to_text: "{text}"
doc_to_target: {target}
metric_list: [{metrics}]
metadata: {{version: 2.5}}
"""
NOTED_BOS = (
    "the tokenizer begins chat prompts with '<s>', which the template does not, as in lm-eval; add_bos_token=False "
    "(--no-add-bos-token) leaves it out"
)
METRIC = "{{metric: {}, aggregation: {}, higher_is_better: {}}}"
# `text` ends in a space, which belongs to the choice; one question and one text are longer than the model.
ROWS = """
from datasets import Dataset, DatasetDict
def splits(**_):
    rows = []
    for n in range(7):
        text = f"What follows {n} in the list of all numbers, " * 2 * (n == 3) + f"say {n}:" + " " * (n % 2)
        choices = [f"{n + 1}", f" {n} and so on", "the other one", "é"]
        long = "Once there was a number that had no end. " * (n % 3 + 1)
        rows.append({"text": text, "choices": choices, "right": n % 4, "last": choices[n % 4], "long": long})
    return DatasetDict(test=Dataset.from_list(rows))
"""
TASKS = {
    "choice": ("multiple_choice", "{{text}}", "right", [("acc", "mean", True), ("acc_norm", "mean", True)]),
    "likely": (
        "loglikelihood", "{{text}}", '" {{last}}"', [("perplexity", "perplexity", False), ("acc", "mean", True)]
    ),
    "rolling": (
        "loglikelihood_rolling", "", '"{{long}}"', [
            ("word_perplexity", "weighted_perplexity", False), ("byte_perplexity", "weighted_perplexity", False),
            ("bits_per_byte", "bits_per_byte", False),
        ],
    ),
}  # fmt: skip


@pytest.fixture
def tasks(tasks_folder: Path) -> None:
    """`TASKS` in place of lm-eval's."""
    (tasks_folder / "rows.py").write_text(ROWS)
    for name, (kind, text, target, metrics) in TASKS.items():
        listed = ", ".join(METRIC.format(*metric) for metric in metrics)
        more = "doc_to_choice: choices\n" if kind == "multiple_choice" else ""
        task = TASK.format(name=name, kind=kind, text=text, target=target, metrics=listed)
        (tasks_folder / f"{name}.yaml").write_text(task + more)


def byte_tokenizer(*, with_bos: bool) -> Any:
    """Bytes, and a few merges that begin with a space or end in a colon. with_bos: every text begins with <s>."""
    pieces = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġan", "Ġand", "Ġt", "Ġth", "0:", "on"]
    merges = [("Ġ", "a"), ("Ġa", "n"), ("Ġan", "d"), ("Ġ", "t"), ("Ġt", "h"), ("0", ":"), ("o", "n")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "</s>", *["<s>"] * with_bos])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    named = {"eos_token": "</s>"}
    if with_bos:
        named["bos_token"] = "<s>"
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **named)


@pytest.fixture(params=["llama", "qwen3.5"], scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with a random model, and transformers' model and tokenizer. One tokenizer has a bos token."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = byte_tokenizer(with_bos=request.param == "llama")
    torch.manual_seed(3)
    theirs = MODELS[request.param](len(tokenizer)).eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter[0].numel() ** 0.5)
    theirs.generation_config.eos_token_id = tokenizer.eos_token_id
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, theirs, tokenizer


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), device="cpu", max_running=3, prefill_chunk=48, **settings))


def test_results_match_lm_evals_own_model(
    checkpoint: tuple[Path, Any, Any], tasks: None, hflm: Any, no_env_info: None, tmp_path: Path
) -> None:
    """Every log-likelihood and metric, with a truncated context and a text of several windows."""
    place, model, tokenizer = checkpoint
    wanted = lm_eval.simple_evaluate(
        hflm(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=2),
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(),
        bootstrap_iters=0,
    )
    with engine_of(place) as engine:
        reports = {name: run_eval(engine, EvalOptions(name)) for name in TASKS}
    for name, report in reports.items():
        theirs = wanted["results"][name]
        assert len(report.scores) == len(TASKS[name][3])
        for score in report.scores:
            assert score.value == pytest.approx(theirs[f"{score.metric},none"], rel=1e-4)
            assert score.better == ("higher" if wanted["higher_is_better"][name][score.metric] else "lower")
        assert (report.task_version, report.kind) == (str(wanted["versions"][name]), TASKS[name][0])
        for row, sample in zip(report.questions, wanted["samples"][name], strict=True):
            found = row.get("choices", [row])
            answers = [answer[0] for answer in sample["resps"]]
            if name == "rolling":
                assert found[0]["logprob"] == pytest.approx(answers[0], abs=1e-3)
                continue
            assert [item["logprob"] for item in found] == pytest.approx([value for value, _ in answers], abs=1e-4)
            assert [item["is_greedy"] for item in found] == [greedy for _, greedy in answers]
    assert [reports[name].cut for name in TASKS] == [4, 1, 0]  # one question, with each of its choices
    assert reports["likely"].scores[0].stderr
    assert "4 texts lost the beginning, because of max_model_len=64." in reports["choice"].table()


def test_texts_without_a_context_and_empty_texts(checkpoint: tuple[Path, Any, Any], hflm: Any) -> None:
    place, model, tokenizer = checkpoint
    asked = [("", "and"), ("", "é"), ("a ", " and"), ("</s>", "a")]
    requests = [Instance("loglikelihood", {}, pair, 0, metadata=("toy", place, 1)) for place, pair in enumerate(asked)]
    texts = [Instance("loglikelihood_rolling", {}, (text,), 0, metadata=("toy", 0, 1)) for text in ("", "a" * 200)]
    theirs = hflm(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
    with engine_of(place) as engine:
        ours = SpecBatchLM(engine, "toy")
        for (logprob, greedy), (value, right) in zip(
            ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True
        ):
            assert (logprob, greedy) == (pytest.approx(value, abs=1e-4), right)
        assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
        if tokenizer.bos_token_id is None:
            assert ours.loglikelihood_rolling(texts[:1]) == [0.0]
        merged = Instance("loglikelihood", {}, (" a", "n"), 0, metadata=("toy", 5, 1))  # one token together
        with pytest.raises(SpecbatchError, match="task='toy': question 5 has a continuation without tokens"):
            ours.loglikelihood([merged])
        with pytest.raises(AssertionError):
            theirs.loglikelihood([merged])


@pytest.mark.parametrize(
    ("context", "continuation", "complaint"),
    [
        ("a", "", "task='toy': question 4 has an empty continuation"),
        (" ", "b", "task='toy': question 4 has a context without tokens"),
        ("a", "b" * 41, "max_model_len=40: question 4 of toy has a continuation of 41 tokens; use at least 41"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(
    make_engine: Any, context: str, continuation: str, complaint: str
) -> None:
    engine = make_engine(str, max_model_len=40)
    engine.tokenizer.bos_id = None
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, **_: encode(text, add_special_tokens=False)
    request = Instance("loglikelihood", {}, (context, continuation), 0, metadata=("toy", 4, 1))
    with pytest.raises(SpecbatchError) as refused:
        SpecBatchLM(engine, "toy").loglikelihood([request])
    assert str(refused.value).startswith(complaint)
    assert not engine.pairs
    engine.tokenizer.eos_id = None
    with pytest.raises(SpecbatchError, match="tokenizer='bytes': it has no beginning-of-text or end-of-text token"):
        SpecBatchLM(engine, "toy").loglikelihood_rolling([request])


def test_special_tokens_are_added_once(make_engine: Any) -> None:
    engine = make_engine(str)
    requests = [Instance("loglikelihood", {}, (text, "c"), 0, metadata=("toy", 0, 1)) for text in ("ab", "<s>ab")]
    SpecBatchLM(engine, "toy").loglikelihood(requests)
    assert engine.pairs == [([256, 97, 98], [99])] * 2
    chat = SpecBatchLM(engine, "toy", chat_template=True)
    chat.loglikelihood(requests)
    assert engine.pairs == [([256, 97, 98], [99])] * 2
    assert chat.notes == [NOTED_BOS]
    SpecBatchLM(engine, "toy", add_bos_token=False).loglikelihood(requests)
    assert engine.pairs == [([97, 98], [99]), ([256, 97, 98], [99])]


def prefers(number: int) -> Callable[[str], str]:
    """A model for which choice `number` is the most likely."""

    def reply(context: str) -> str:
        if not context:
            return ""
        n = int(context.rsplit("say ", 1)[1].strip(" :"))
        return " " * (1 + n % 2) + [f"{n + 1}", f" {n} and so on", "the other one", "é"][number]

    return reply


def test_row_per_question(make_engine: Any, tasks: None, tmp_path: Path) -> None:
    output = tmp_path / "out"
    seen: list[tuple[int, int]] = []
    options = EvalOptions("choice", limit=3, output=output)
    report = run_eval(make_engine(prefers(0)), options, lambda *at: seen.append(at))
    assert seen == [(place, 12) for place in range(1, 13)]
    first = report.questions[0]
    assert first == {
        "doc_id": 0,
        "question": "say 0:",
        "target": "1",
        "prompt_hash": first["prompt_hash"],
        "scores": {"none": {"acc": 1.0, "acc_norm": 1.0}},
        "choices": [
            {"text": "1", "logprob": -0.25, "is_greedy": True},  # the space before it counts, too
            {"text": " 0 and so on", "logprob": -0.125 - 4 * 12, "is_greedy": False},
            {"text": "the other one", "logprob": -0.125 - 4 * 13, "is_greedy": False},
            {"text": "é", "logprob": -0.125 - 4 * 2, "is_greedy": False},
        ],
        "picked": "1",
    }
    assert [row["target"] for row in report.questions] == ["1", " 1 and so on", "the other one"]
    assert {row["picked"] for row in report.questions} == {"1", "2", "3"}
    assert [row["scores"]["none"]["acc"] for row in report.questions] == [1.0, 0.0, 0.0]
    (acc, _) = report.scores
    assert (acc.metric, acc.value, acc.n, acc.unparsed) == ("acc", pytest.approx(1 / 3), 3, None)
    assert acc.stderr == pytest.approx((2 / 9 / 2) ** 0.5)
    assert EvalReport.load(output) == report
    assert not (output / "answers.partial.jsonl").exists()


def test_table_has_no_columns_without_measurements(make_engine: Any, tasks: None, tmp_path: Path) -> None:
    report = run_eval(make_engine(prefers(0)), EvalOptions("rolling", output=tmp_path / "out"))
    table = report.table()
    assert table == (tmp_path / "out" / "summary.md").read_text().removesuffix("\n")
    for absent in ("accept", "TTFT", "TPOT", "truncated", "answers", "Speculation", "Answers", "lost the beginning"):
        assert absent not in table
    assert "word_perplexity (lower is better)" in table
    assert "Given texts were scored; nothing was generated or drafted" in table
    (row, *_) = csv.DictReader((tmp_path / "out" / "summary.csv").open())
    absent = {"truncated", "accept_length", "mean_ttft_s", "output_throughput", "max_new_tokens"}
    assert not absent & row.keys()
    assert row["metric"] == "word_perplexity"
    body = report.as_dict()
    assert not {"truncated", "finish_reasons", "max_new_tokens"} & body.keys()
    json.dumps(body)
    assert "logprob" in report.questions[0]


def test_bootstrapped_error_prints_nothing(capfd: pytest.CaptureFixture[str], make_engine: Any, tasks: None) -> None:
    """lm-eval computes that of a perplexity in processes of its own, and prints a line."""
    report = run_eval(make_engine(prefers(0)), EvalOptions("likely"))
    assert capfd.readouterr() == ("", "")
    perplexity, acc = report.scores
    assert (perplexity.better, acc.better, acc.value) == ("lower", "higher", 2 / 7)
    again = run_eval(make_engine(prefers(0)), EvalOptions("likely"))
    assert perplexity.stderr
    assert again.scores == report.scores
    assert report.questions[0].keys() >= {"target", "logprob", "is_greedy"}


def test_interrupted_run_keeps_finished_scores(make_engine: Any, tasks: None, tmp_path: Path) -> None:
    engine = make_engine(prefers(0))
    engine.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        run_eval(engine, EvalOptions("choice", limit=1, output=tmp_path / "out"))
    _, *kept = [json.loads(line) for line in (tmp_path / "out" / "answers.partial.jsonl").read_text().splitlines()]
    assert [(row["doc_id"], row["part"]) for row in kept] == [(0, 3), (0, 2)]
    assert {"logprob", "is_greedy"} < kept[0].keys()


@pytest.mark.parametrize(
    ("task", "asked", "complaint"),
    [
        ("choice", {"max_new_tokens": 5}, "max_new_tokens=5: task choice (multiple_choice) scores given texts"),
        ("rolling", {"num_fewshot": 2}, "num_fewshot=2: task rolling"),
        ("rolling", {"chat_template": True}, "chat_template=True: task rolling"),
    ],
)
def test_options_that_the_task_ignores_are_refused(
    tasks: None, task: str, asked: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SpecbatchError) as refused:
        prepare(EvalOptions(task, **asked))
    assert str(refused.value).startswith(complaint)


def test_speculation_and_grids_are_refused(make_engine: Any, tasks: None, tmp_path: Path) -> None:
    """Before anything is loaded."""
    drafting = EngineConfig(speculation=Speculation("ngram"), graphs=Graphs(decode="whole"))
    with pytest.raises(SpecbatchError) as refused:
        prepare(EvalOptions("choice")).engine_config(drafting)
    assert str(refused.value) == (
        "algorithm='ngram': task choice (multiple_choice) scores given texts without drafting; use 'none', "
        "or a task that generates"
    )
    engine = make_engine(prefers(0))
    engine.config = drafting
    with pytest.raises(SpecbatchError, match="algorithm='ngram'"):
        run_eval(engine, EvalOptions("choice"))
    plain = replace(drafting, speculation=Speculation())
    assert prepare(EvalOptions("choice")).engine_config(plain).graphs == Graphs(decode="off")
    assert prepare(EvalOptions("one_digit_sums")).engine_config(drafting) == drafting
    options = GridOptions(EvalOptions("choice"), (1,))
    with pytest.raises(SpecbatchError, match=r"configs='baseline': task choice \(multiple_choice\) scores given texts"):
        run_grids({"baseline": plain}, [options], tmp_path)


def test_runs_pair_by_question(make_engine: Any, tasks: None, tmp_path: Path, policy: Any) -> None:
    for name, number in (("a", 0), ("b", 2)):
        run_eval(make_engine(prefers(number)), EvalOptions("choice", output=tmp_path / name))
        run_eval(make_engine(prefers(number)), EvalOptions("rolling", output=tmp_path / f"{name}-texts"))
    rows = {row.metric: row for row in compare(tmp_path / "a", tmp_path / "b").rows}
    assert rows.keys() == {"none acc", "none acc_norm"}
    assert rows["none acc"].over.startswith("7 questions, paired: 2 lost, 2 gained")
    texts = {row.metric: row for row in compare(tmp_path / "a-texts", tmp_path / "b-texts").rows}
    assert {(row.better, row.shown.unit, row.verdict) for row in texts.values()} == {("lower", "", "not judged")}
    rules = policy('[accuracy]\nmetric = "acc"\nalpha = 0.05\n')
    result = run_gate(rules, tmp_path / "b", tmp_path / "a")
    assert {check.name: check.passed for check in result.checks} == {
        "requests finished": True,
        "accuracy none acc has not fallen": True,
    }
    wrong = policy('[accuracy]\nmetric = "bits_per_byte"\nmay_fall = true\nat_least = 0.5\n')
    with pytest.raises(SpecbatchError, match="metric='bits_per_byte': lower is better"):
        run_gate(wrong, tmp_path / "b-texts")
