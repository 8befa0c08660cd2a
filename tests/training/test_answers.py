"""What heads learn from: the target's own answers, which say whose they are and survive an interruption."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from specbatch import weights
from specbatch.errors import SpecbatchError
from specbatch.training import run
from specbatch.training.answers import _weights_hash, partial_answers, read_answers
from specbatch.training.data import Batch, Example

from .conftest import CPU, MAX_LEN, VOCABULARY

OLD = [{"prompt_token_ids": [1] * 2, "token_ids": list(range(count - 2))} for count in (5, 9, 6)]


@pytest.fixture
def old_file(tmp_path):
    """As it was before it said who answered."""
    path = tmp_path / "old.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in OLD))
    return path


def lines(folder):
    return (folder / "answers.jsonl").read_text().splitlines(keepends=True)


def interrupt_after(count):
    def report(done, total):
        if done == count:
            raise KeyboardInterrupt

    return report


def test_answers_are_the_targets_greedy_tokens(examples, target):
    """Greedy: every token of an answer is the likeliest one behind what stands before it."""
    for start in range(0, 12, 4):
        batch = Batch.of(examples[start : start + 4], CPU)
        last, _ = target.features(batch, ())
        likeliest = target.logits(last.flatten(0, 1)).argmax(-1).view_as(batch.tokens)
        for row, item in enumerate(examples[start : start + 4]):
            assert likeliest[row, item.prompt - 1 : len(item.tokens) - 1].tolist() == list(item.tokens[item.prompt :])


def test_answers_keep_the_order_of_prompts(examples, prompts_file):
    asked = [tuple(json.loads(line)["prompt_token_ids"]) for line in prompts_file.read_text().splitlines()]
    assert [item.tokens[: item.prompt] for item in examples] == asked


def test_sampled_answers_depend_on_the_seed(train, prompts_file, checkpoint, tmp_path):
    found = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        how = {"steps": 1, "temperature": 1.0, "seed": seed, "limit": 16, "held_out": 2}
        train(tmp_path / name, "eagle3", data=prompts_file, **how)
        found[name], _ = read_answers(tmp_path / name / "answers.jsonl", checkpoint, MAX_LEN, print)
    assert found["first"] == found["again"] != found["other"]


def test_answer_file_identifies_model_and_prompts(answers_file, checkpoint, train, tmp_path):
    header = json.loads(lines(answers_file.parent)[0])
    assert (header["model"], header["origin"]) == (checkpoint.name, checkpoint.origin)
    assert (header["vocabulary"], header["prompts"], header["dtype"]) == (VOCABULARY, 70, "float32")
    assert header["sampling"] == {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 30, "seed": 0}
    said: list[str] = []
    record = train(tmp_path, "eagle3", answers=answers_file, steps=1, log=said.append)
    assert record["data"]["answered"] == header
    assert not any(line.startswith("answers:") for line in said)


def moved_by(name, change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors[name])
        save_file(tensors, folder / "model.safetensors")

    return edit


def described_by(name, **changes):
    def edit(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


OTHERS = {
    "one vector": (moved_by("model.layers.8.input_layernorm.weight", lambda x: x[7:8].add_(0.1)), "weights"),
    "a merge in the middle": (
        moved_by("model.layers.3.mlp.up_proj.weight", lambda x: x.add_(x[:, :1] @ x[:1] / 8)),
        "weights",
    ),
    "one new word": (moved_by("model.embed_tokens.weight", lambda x: x[VOCABULARY - 2].mul_(1.1)), "weights"),
    "one row of the head": (moved_by("lm_head.weight", lambda x: x[5].mul_(1.1)), "weights"),
    "another theta": (described_by("config.json", rope_theta=501.0), "theta (500.0 there, 501.0 now)"),
    "another end": (described_by("generation_config.json", eos_token_id=[7]), "end_tokens ([2] there, [2, 7] now)"),
}


@pytest.fixture
def other_model(target_folder, tmp_path):
    """A copy of the target, under its name."""
    folder = shutil.copytree(target_folder, tmp_path / "other" / target_folder.name)
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("edit", "named"), OTHERS.values(), ids=OTHERS)
def test_answers_of_another_model_are_refused(
    train, answers_file, prompts_file, target_folder, other_model, tmp_path, edit, named
):
    """Whose name and vocabulary are the same, by --answers and by --out."""
    edit(other_model)
    with pytest.raises(SpecbatchError) as caught:
        read_answers(answers_file, weights.open_checkpoint(str(other_model)), MAX_LEN, print)
    says = str(caught.value)
    assert says.startswith(f"answers='{answers_file}': ")
    for part in (str(target_folder), str(other_model), named, "use that model, or --data"):
        assert part in says
    (tmp_path / "head").mkdir()
    shutil.copy(answers_file, tmp_path / "head")
    with pytest.raises(SpecbatchError, match="was made with another") as caught:
        train(tmp_path / "head", "eagle3", data=prompts_file, model=other_model)
    assert named in str(caught.value)
    assert lines(tmp_path / "head") == lines(answers_file.parent)


def test_answers_of_another_vocabulary_are_refused(train, answers_file, prompts_file, other_model, tmp_path):
    words = {f"w{index}": index ^ 1 for index in range(VOCABULARY - 2)}
    Tokenizer(models.WordLevel(words, unk_token="w1")).save(str(other_model / "tokenizer.json"))
    with pytest.raises(SpecbatchError, match="with another vocabulary; use that model"):
        train(tmp_path / "head", "eagle3", answers=answers_file, tokenizer=str(other_model))


def test_moved_model_is_recognised(train, answers_file, examples, prompts_file, target_folder, tmp_path):
    folder = shutil.copytree(target_folder, tmp_path / "moved")
    described_by("config.json", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 500.0})(folder)
    moved = weights.open_checkpoint(str(folder))
    assert read_answers(answers_file, moved, MAX_LEN, print)[0] == examples
    (tmp_path / "head").mkdir()
    shutil.copy(answers_file, tmp_path / "head")
    said: list[str] = []
    train(tmp_path / "head", "eagle3", data=prompts_file, model=folder, steps=1, log=said.append)
    assert any("70 of 70 are finished" in line for line in said)


def test_weight_fingerprint_samples_every_row():
    matrix = torch.zeros(50, 7)
    target = SimpleNamespace(names=lambda: ["x"], tensor=lambda name: matrix)
    zeros = _weights_hash(target)
    for row in range(50):
        matrix.zero_()[row] = 1
        assert _weights_hash(target) != zeros


def test_file_without_a_header_is_read_with_a_note(old_file, checkpoint):
    said: list[str] = []
    found, header = read_answers(old_file, checkpoint, 64, said.append)
    assert header is None
    assert found == [Example((*row["prompt_token_ids"], *row["token_ids"]), 2) for row in OLD]
    (line,) = said
    assert str(old_file) in line
    assert "does not name the model that answered" in line
    cut, _ = read_answers(old_file, checkpoint, 6, print)
    assert [len(item.tokens) for item in cut] == [5, 6, 6]
    assert read_answers(old_file, checkpoint, 4, print)[0] == []  # answers of two tokens teach nothing


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"prompt_token_ids": [1]}',
        '{"prompt_token_ids": [1], "token_ids": [40, 1, 1]}',
        '{"prompt_token_ids": [true], "token_ids": [1, 1, 1]}',
        '{"prompt_token_ids": [], "token_ids": [1, 1, 1]}',
        '{"prompt_token_ids": [1], "token_ids": [1, 1, 1], "index": "x"}',
    ],
)
def test_invalid_lines_are_refused_with_their_number(old_file, checkpoint, line):
    with old_file.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(SpecbatchError, match=r"old\.jsonl:4': a row has"):
        read_answers(old_file, checkpoint, 64, print)


DAMAGED = [
    (b'{"index": 900, "prompt_token_ids": [3, 4], "token_ids": [1, 2, 3]}', "an index below 70"),
    (b'{"index": "a", "prompt_token_ids": [3, 4], "token_ids": [1, 2, 3]}', "an index below 70"),
    (b'{"index": 9}', "prompt_token_ids"),
    (b'{"index": 9, "prompt_token_ids": 3, "token_ids": [1, 2, 3]}', "prompt_token_ids"),
    (b"\xff\xfe", "prompt_token_ids"),
]


@pytest.mark.parametrize(("line", "named"), DAMAGED)
def test_damaged_answers_are_refused_with_their_line_number(
    answers_file, checkpoint, prompts_file, tmp_path, line, named
):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"".join(answers_file.read_bytes().splitlines(keepends=True)[:3]) + line + b"\n")
    with pytest.raises(SpecbatchError, match=rf"answers\.jsonl:4': a row has.*{named}"):
        read_answers(path, checkpoint, MAX_LEN, print)
    prompts = [json.loads(line)["prompt_token_ids"] for line in prompts_file.read_text().splitlines()]
    kept = partial_answers(path, json.loads(lines(answers_file.parent)[0]), prompts, VOCABULARY)
    with pytest.raises(SpecbatchError, match=r"answers\.jsonl:4': is not a row of this job"):
        kept.load()
    moved = {"index": 9, "prompt_token_ids": [*prompts[9], 4], "token_ids": [1, 2, 3]}
    path.write_text(lines(answers_file.parent)[0] + json.dumps(moved))
    kept.load()  # cut short
    path.write_text(path.read_text() + "\n")
    with pytest.raises(SpecbatchError, match=r"answers\.jsonl:2': is not a row of this job"):
        kept.load()


@pytest.mark.parametrize("change", ["model", "prompts", "weights_sha256"])
def test_damaged_header_is_refused(answers_file, checkpoint, tmp_path, change):
    header, *rows = lines(answers_file.parent)
    described = json.loads(header)
    described[change] = None
    if change == "model":
        del described[change]
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(described) + "\n" + "".join(rows))
    with pytest.raises(
        SpecbatchError, match="weights;" if change == "weights_sha256" else "answers.jsonl:1': the header"
    ):
        read_answers(path, checkpoint, MAX_LEN, print)


def test_answers_to_other_prompts_are_not_resumed(train, answers_file, prompts_file, tmp_path):
    shutil.copy(answers_file, tmp_path)
    with pytest.raises(SpecbatchError, match=r"made with another prompts \(70 there, 30 now\); finish"):
        train(tmp_path, "eagle3", data=prompts_file, limit=30)
    other = tmp_path / "other.jsonl"
    other.write_text(prompts_file.read_text().replace("[", "[3, ", 1))
    with pytest.raises(SpecbatchError, match="made with another prompts; finish"):
        train(tmp_path, "eagle3", data=other)


def test_user_answer_files_are_not_overwritten(train, prompts_file, tmp_path):
    path = tmp_path / "answers.jsonl"
    for text in (json.dumps({"index": 0} | OLD[0]) + "\n", "my notes", "my notes\n", "[]\n"):
        path.write_text(text)
        with pytest.raises(SpecbatchError, match="is not the partial output of a job; name another output"):
            train(tmp_path, "eagle3", data=prompts_file)
        assert path.read_text() == text


def test_interrupted_run_resumes_its_answers(train, prompts_file, checkpoint, tmp_path, monkeypatch):
    """Sampled, so that a seed that did not belong to its prompt would show."""
    how = {"data": prompts_file, "steps": 1, "temperature": 1.0, "limit": 30, "held_out": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, "eagle3", **how)
    with pytest.raises(KeyboardInterrupt, match=f"kept 12 finished of 30 answers in {parts}.*--out {parts} continues"):
        train(parts, "eagle3", **how, report=interrupt_after(12))
    assert len(lines(parts)) == 1 + 12
    with (parts / "answers.jsonl").open("a") as file:
        file.write('{"index": 3, "prompt_tok')  # as a power cut leaves it
    said: list[str] = []
    assert len(read_answers(parts / "answers.jsonl", checkpoint, MAX_LEN, said.append)[0]) == 12
    assert "12 of 30" in said[0]

    asked: list[int] = []
    open_engine = run.answer

    def counting(kept, prompts, *rest, **named):
        asked.append(len(prompts) - len(kept.rows))
        return open_engine(kept, prompts, *rest, **named)

    monkeypatch.setattr(run, "answer", counting)
    train(parts, "eagle3", **how)
    assert asked == [18]
    assert sorted(lines(parts)[1:]) == sorted(lines(whole)[1:])
    assert lines(parts)[0] == lines(whole)[0]


def test_failed_training_reuses_answers(train, prompts_file, tmp_path):
    with pytest.raises(SpecbatchError, match="held_out=69"):
        train(tmp_path, "eagle3", data=prompts_file, held_out=69, max_len=10)
    before = lines(tmp_path)
    said: list[str] = []
    train(tmp_path, "eagle3", data=prompts_file, max_len=10, held_out=2, steps=1, log=said.append)
    assert lines(tmp_path) == before
    assert any("are finished in" in line for line in said)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"temperature": 0.5}, "temperature (0.0 there, 0.5 now)"), ({"seed": 3}, "seed (0 there, 3 now)")],
)
def test_different_settings_do_not_resume(train, prompts_file, tmp_path, change, named):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "eagle3", data=prompts_file, report=interrupt_after(2))
    before = lines(tmp_path)
    with pytest.raises(SpecbatchError) as caught:
        train(tmp_path, "eagle3", data=prompts_file, **change)
    assert named in str(caught.value)
    assert lines(tmp_path) == before
