"""Tasks: data from the hub, from files or bundled, few-shot examples, and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest

import specbatch
from specbatch.errors import SpecbatchError
from specbatch.evals import rows
from specbatch.evals.prompts import task_prompts
from specbatch.evals.report import EvalReport
from specbatch.evals.run import EvalOptions, prepare, run_eval
from specbatch.evals.task import EvalTask, load_task
from specbatch.jobs.questions import bundled_questions
from specbatch.records.mcnemar import changes, pick_score

OTHER = """
task: {name}
output_type: {kind}
custom_dataset: !function rows.splits
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["\\n"]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROWS = """
from datasets import Dataset, DatasetDict
def splits(**_):
    return DatasetDict(test=Dataset.from_list([{"q": f"{n}", "a": f"{n}"} for n in range(3)]))
def fail(**_):
    raise ModuleNotFoundError("No module named 'sympy'\\nlong story")
"""


def load(name: str, **options: Any) -> EvalTask:
    return load_task(name, **({"num_fewshot": None, "data": None, "fewshot_data": None, "seed": 1234} | options))


@pytest.fixture
def other_tasks(tasks_folder: Path) -> None:
    kinds = {"copy": "generate_until", "unsafe": "generate_until", "needy": "generate_until", "odd": "dreaming"}
    for name, kind in (kinds | {"choosy": "multiple_choice"}).items():
        text = OTHER.format(name="copycat" if name == "copy" else name, kind=kind)
        if name in ("needy", "odd", "choosy"):  # the last two are refused before their data is read
            text = text.replace(".splits", ".fail")
        (tasks_folder / f"{name}.yaml").write_text(text + "unsafe_code: true\n" * (name == "unsafe"))
    (tasks_folder / "rows.py").write_text(ROWS)


@pytest.fixture
def hub(use_hub: Any, make_rows: Any) -> dict[str, Any]:
    """The hub, with small data sets in it."""
    stored = {
        ("openai/gsm8k", "main"): {"train": make_rows(500, 12), "test": make_rows(100, 8)},
        ("madrylab/gsm8k-platinum", "main"): {"test": make_rows(100, 8)},
    }

    def load_dataset(path: str, name: str, **_: Any) -> Any:
        rows = stored[path, name]
        return datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in rows.items()})

    use_hub(load_dataset)
    return stored


@pytest.fixture
def engine(make_engine: Any) -> Any:
    return make_engine(lambda prompt: " 1")


def prompts_of(engine: Any) -> list[str]:
    return [engine.tokenizer.decode(prompt) for prompt in engine.calls[-1]["prompts"]]


def test_prompts_and_scores_are_lm_evals_own(
    make_engine: Any, hub: Any, mixed_reply: Any, scored_file: Path, shots_file: Path, no_env_info: None
) -> None:
    import lm_eval.evaluator

    from specbatch.evals.lm import SpecBatchLM

    upstream = Path(lm_eval.tasks.__file__).parent
    manager = lm_eval.tasks.TaskManager(
        include_path=[upstream / "gsm8k", upstream / "gsm8k_platinum"], include_defaults=False
    )
    shots = {"gsm8k": shots_file, "gsm8k_platinum": None}
    for name in shots:
        theirs = make_engine(mixed_reply)
        results = lm_eval.simple_evaluate(
            SpecBatchLM(theirs, name), tasks=[name], task_manager=manager, limit=5, bootstrap_iters=10
        )
        ours = make_engine(mixed_reply)
        report = run_eval(ours, EvalOptions(name, limit=5, data=scored_file, fewshot_data=shots[name]))
        assert prompts_of(ours) == prompts_of(theirs)
        for score in report.scores:
            assert score.value == results["results"][name][f"exact_match,{score.filter}"]
            assert score.stderr == results["results"][name][f"exact_match_stderr,{score.filter}"]


def test_examples_of_gsm8k_are_training_rows(engine: Any, evaluate: Any) -> None:
    report = evaluate("gsm8k", engine=engine, limit=2)
    assert report.fewshot_source == str(bundled_questions("gsm8k_train"))
    assert (report.warning, "Warning" in report.table()) == ("", False)


OF_PLATINUM = "few-shot examples come from the scored rows, as lm-eval defines the task (--fewshot-data gsm8k_train "


def test_examples_of_platinum_are_other_scored_rows(engine: Any, evaluate: Any) -> None:
    report = evaluate("gsm8k_platinum", engine=engine, data=None, limit=3)
    assert report.fewshot_source == f"the other rows of {report.data_source}"
    assert report.warning == OF_PLATINUM + "takes training rows)"
    scored = {row["question"] for row in bundled_questions("gsm8k_platinum").rows}
    for prompt in prompts_of(engine):
        shown = [part.split("\nAnswer:")[0] for part in prompt.split("Question: ")[1:]]
        assert (len(shown), len(set(shown)), scored.issuperset(shown)) == (6, 6, True)


def test_bundled_training_rows_can_be_named_as_examples(engine: Any, evaluate: Any) -> None:
    report = evaluate("gsm8k_platinum", engine=engine, data=None, limit=3, fewshot_data=Path("gsm8k_train"))
    assert (report.fewshot_source, report.warning) == (str(bundled_questions("gsm8k_train")), "")
    training = {row["question"] for row in bundled_questions("gsm8k_train").rows}
    for prompt in prompts_of(engine):
        *shown, asked = (part.split("\nAnswer:")[0] for part in prompt.split("Question: ")[1:])
        assert (len(shown), training.issuperset(shown), asked in training) == (5, True, False)


def test_duplicates_of_the_question_are_never_its_examples(engine: Any, evaluate: Any, write_rows: Any) -> None:
    """lm-eval draws again where the examples that it drew are the question's row too often."""
    own, *others = bundled_questions("gsm8k_platinum").rows[:8]
    evaluate("gsm8k_platinum", engine=engine, data=write_rows("rows.jsonl", [own] * 20 + others), limit=20)
    for prompt in prompts_of(engine):
        assert (prompt.count("Question: "), prompt.count(own["question"])) == (6, 1)


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_platinum"])
def test_scored_training_rows_give_examples_but_never_the_own_row(
    engine: Any, evaluate: Any, write_rows: Any, name: str
) -> None:
    scored = bundled_questions("gsm8k_train").rows[:8]
    report = evaluate(name, engine=engine, data=write_rows("rows.jsonl", scored))
    assert report.fewshot_source == f"the other rows of {report.data_source}"
    why = (
        "because some of these are training rows."
        if name == "gsm8k"
        else "as lm-eval defines the task (--fewshot-data "
    )
    assert f"Warning: few-shot examples come from the scored rows, {why}" in report.table()
    for prompt, row in zip(prompts_of(engine), scored, strict=True):
        assert prompt.count("Question: ") == 6
        assert prompt.count(row["question"]) == 1
        assert prompt.endswith(f"Question: {row['question']}\nAnswer:")


def test_seed_draws_the_examples(evaluate: Any) -> None:
    one, again, other = (evaluate(seed=seed).prompts_sha256 for seed in (1234, 1234, 7))
    assert one == again != other


def test_platinum_takes_examples_from_a_file_too(engine: Any, evaluate: Any, shots_file: Path) -> None:
    evaluate("gsm8k_platinum", engine=engine, fewshot_data=shots_file, num_fewshot=2)
    assert all(prompt.count("? #5") == 2 and prompt.count("? #1") == 1 for prompt in prompts_of(engine))


def test_no_examples(engine: Any, evaluate: Any) -> None:
    report = evaluate(engine=engine, num_fewshot=0)
    assert prompts_of(engine)[0] == "Question: What comes before 101? #100\nAnswer:"
    assert (report.num_fewshot, report.fewshot_source) == (0, "none")


def test_number_of_examples_is_limited_by_the_rows(
    scored_file: Path, shots_file: Path, write_rows: Any, make_rows: Any
) -> None:
    training = bundled_questions("gsm8k_train").rows
    once = write_rows("once.jsonl", make_rows(100, 7) + training[:1])
    twice = write_rows("twice.jsonl", training[:6] + training[:1])
    for files, most in (
        ({"data": scored_file}, 7473),
        ({"data": once}, 7),
        ({"data": scored_file, "fewshot_data": shots_file}, 12),
        ({"data": twice}, 5),
    ):
        assert load("gsm8k", **files, num_fewshot=most).num_fewshot == most
        with pytest.raises(SpecbatchError, match=f"num_fewshot={most + 1}: .*use at most {most}"):
            load("gsm8k", **files, num_fewshot=most + 1)


def test_task_with_fixed_examples(scored_file: Path) -> None:
    task = load("gsm8k_cot", data=scored_file)
    assert (task.num_fewshot, task.fewshot_source) == (8, "the task's own fixed examples")


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("gsm8k_cot", {"data": "scored", "fewshot_data": "shots"}, "has fixed examples"),
        ("gsm8k_cot", {"data": "scored", "num_fewshot": 9}, "use at most 8"),
        ("gsm8k_cot_zeroshot", {"data": "scored", "num_fewshot": 5},
         "num_fewshot=5: task gsm8k_cot_zeroshot is defined without few-shot examples"),
        ("gsm8k", {"fewshot_data": "shots", "num_fewshot": 0}, "gsm8k is asked without examples"),
        ("gsm8k_cot_zeroshot", {"fewshot_data": "shots"}, "gsm8k_cot_zeroshot is asked without examples"),
        ("gsm8k_platinum", {"fewshot_data": Path("gsm8k")},
         "fewshot_data='gsm8k': 1209 of its questions are scored as well, in bundled gsm8k_platinum test; name"),
        ("gsm8k", {"data": "scored", "fewshot_data": "scored"}, "8 of its questions are scored as well, in scored"),
        ("one_digit_sums", {"data": "scored"}, "data=.*: the task one_digit_sums has its own questions; leave it out"),
        ("one_digit_sums", {"fewshot_data": "shots"}, "fewshot_data=.*: the task one_digit_sums has its own questions"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused(
    scored_file: Path, shots_file: Path, task: str, options: dict[str, Any], message: str
) -> None:
    files = {"scored": scored_file, "shots": shots_file}
    with pytest.raises(SpecbatchError, match=message):
        load(task, **{name: files.get(value, value) for name, value in options.items()})


@pytest.mark.parametrize(
    ("name", "shots"),
    [
        ("gsm8k", "bundled gsm8k train (7,473 questions, sha256 17f347dc5147)"),
        ("gsm8k_cot", "the task's own fixed examples"),
        ("gsm8k_cot_llama", "the task's own fixed examples"),
        ("gsm8k_cot_self_consistency", "the task's own fixed examples"),
        ("gsm8k_cot_zeroshot", "none"),
        ("gsm8k_platinum", "the other rows of bundled gsm8k_platinum test (1,209 questions, sha256 556e2c408a2e)"),
        ("gsm8k_platinum_cot", "the task's own fixed examples"),
        ("gsm8k_platinum_cot_llama", "the task's own fixed examples"),
        ("gsm8k_platinum_cot_self_consistency", "the task's own fixed examples"),
        ("gsm8k_platinum_cot_zeroshot", "none"),
    ],
)
def test_rows_are_the_bundled_ones_whatever_the_hub_has(no_hub: None, name: str, shots: str) -> None:
    task = load(name)
    bundled = bundled_questions("gsm8k_platinum" if "platinum" in name else "gsm8k")
    assert (task.data_source, task.fewshot_source) == (str(bundled), shots)
    assert task.task.eval_docs.to_list() == bundled.rows


def test_other_tasks_and_groups_get_the_bundled_rows_too(no_hub: None, tasks_folder: Path) -> None:
    folder = Path(lm_eval.tasks.__file__).parent / "gsm8k"
    for name in ("one", "other"):
        text = f"include: {folder}/gsm8k.yaml\ntask: {name}_of_mine\n"
        (tasks_folder / f"{name}.yaml").write_text(text)
    (tasks_folder / "mine.yaml").write_text("group: mine\ntask: [one_of_mine, other_of_mine]\n")
    group = load("mine")
    assert (group.data_source, len(group.tasks)) == (str(bundled_questions("gsm8k")), 2)
    assert group.fewshot_source == str(bundled_questions("gsm8k_train"))


def test_tasks_of_a_user_read_the_bundled_splits(no_hub: None, tasks_folder: Path, shots_file: Path) -> None:
    text = (
        OTHER.format(name="mine", kind="generate_until").replace("{{q}}", "{{question}}").replace("{{a}}", "{{answer}}")
    )
    path = tasks_folder / "mine.yaml"

    def write(split: str) -> None:
        on_hub = "dataset_path: openai/gsm8k\ndataset_name: main\nprocess_docs: !function rows.last"
        path.write_text(
            text.replace("custom_dataset: !function rows.splits", on_hub).replace("test_split: test", split)
        )

    (tasks_folder / "rows.py").write_text("def last(docs):\n    return docs.select(range(len(docs) - 10, len(docs)))\n")
    write("validation_split: test\nfewshot_split: train\nnum_fewshot: 2")
    mine = load("mine", fewshot_data=shots_file)
    assert mine.task.eval_docs.to_list() == bundled_questions("gsm8k").rows[-10:]
    assert [row["answer"][-3:] for row in mine.task.sampler.df] == [str(number) for number in range(502, 512)]
    assert load("mine", data=shots_file).data_source.startswith("shots.jsonl (12 questions")
    write("test_split: train")
    with pytest.raises(SpecbatchError, match=r"data=.*: the task scores the split train, not test; leave it out"):
        load("mine", data=shots_file)
    write("test_split: dev")
    with pytest.raises(SpecbatchError, match="split='dev': this data set has train, test"):
        load("mine")


def test_files_are_refused_before_another_data_set_is_read(no_hub: None, tasks_folder: Path, shots_file: Path) -> None:
    text = OTHER.format(name="foreign", kind="generate_until")
    (tasks_folder / "foreign.yaml").write_text(
        text.replace("custom_dataset: !function rows.splits", "dataset_path: x/y")
    )
    for setting in ("data", "fewshot_data"):
        with pytest.raises(SpecbatchError, match=f"^{setting}=.*: the task reads the data set x/y; leave it out"):
            load("foreign", **{setting: shots_file})


def test_rows_are_unpacked_only_for_tasks_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []
    monkeypatch.setattr(rows, "bundled_questions", lambda name: unpacked.append(name) or bundled_questions(name))
    load("one_digit_sums")
    assert unpacked == []
    load("gsm8k_cot")
    assert {*unpacked} == {"gsm8k"}


def test_other_generating_tasks_run(other_tasks: None, make_engine: Any) -> None:
    report = run_eval(make_engine(lambda prompt: prompt[-1]), EvalOptions("copycat"))
    (score,) = report.scores
    assert (score.filter, score.value, score.n, score.unparsed) == ("none", 1.0, 3, None)
    assert (report.num_fewshot, report.data_source) == (0, "made by the task")
    report = run_eval(make_engine(lambda prompt: "0"), EvalOptions("copycat", num_fewshot=1))
    assert "may be among its own examples" in report.fewshot_source


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("gsm9k", "no such task; did you mean gsm8k"),
        ("copycatt", "no such task; did you mean copycat"),
        ("zzzzzzz", "no such task; use gsm8k, gsm8k_platinum, one_digit_sums, one_digit_choices or another task of"),
        ("odd", "is of type dreaming; use a task of type generate_until or multiple_choice or loglikelihood or"),
        ("needy", "lm-eval cannot load it here (No module named 'sympy')"),
        ("unsafe", "executes code written by the model"),
    ],
)
def test_refused_tasks(other_tasks: None, name: str, complaint: str) -> None:
    with pytest.raises(SpecbatchError) as refused:
        load(name)
    assert str(refused.value).startswith(f"task={name!r}: {complaint}")
    assert "\n" not in str(refused.value)


ANIMALS = """
from datasets import Dataset, DatasetDict
def rows(count, first):
    made = [{"q": f"{n}", "a": n % 2, "text": f"{n % 2}"} for n in range(first, first + count)]
    return lambda **_: DatasetDict(train=Dataset.from_list(made[:2]), test=Dataset.from_list(made[2:]))
cats, dogs, fish = rows(5, 0), rows(7, 10), rows(4, 20)
"""


@pytest.fixture(params=["generate_until", "multiple_choice"])
def animals(tasks_folder: Path, request: Any) -> Path:
    """Three tasks of 3, 5 and 2 questions; the first two are a group within the group, and all have a tag."""
    (tasks_folder / "animals.py").write_text(ANIMALS)
    metric = "exact_match" if request.param == "generate_until" else "acc"
    for name in ("cats", "dogs", "fish"):
        text = (
            OTHER.format(name=name, kind=request.param)
            .replace("rows.splits", f"animals.{name}")
            .replace("{{q}}", "number {{q}}")
        )
        text = text.replace("test_split", "training_split: train\nnum_fewshot: 1\ntag: pets\ntest_split")
        if metric == "acc":
            text = text.replace("exact_match", "acc").replace("num_fewshot: 1\n", "") + "doc_to_choice: ['0', '1']\n"
        else:
            text = text.replace("{{a}}", "{{text}}")
        (tasks_folder / f"{name}.yaml").write_text(text)
    by = f"aggregate_metric_list: [{{metric: {metric}, weight_by_size: "
    (tasks_folder / "land.yaml").write_text(f"group: land\ntask: [cats, dogs]\n{by}true}}]\nmetadata: {{version: 3}}\n")
    (tasks_folder / "animals.yaml").write_text(f"group: animals\ntask: [land, fish]\n{by}false}}]\n")
    return tasks_folder


def test_group_has_lm_evals_scores(animals: Path, make_engine: Any, no_env_info: None, tmp_path: Path) -> None:
    import lm_eval.evaluator

    from specbatch.evals.lm import SpecBatchLM

    manager = lm_eval.tasks.TaskManager(include_path=animals, include_defaults=False)

    space = " " * ("multiple_choice" in (animals / "cats.yaml").read_text())  # before a choice

    def engine(odd: str = "137") -> Any:
        return make_engine(lambda prompt: space + "01"[prompt[-1] in odd])  # but for 5 and 9

    theirs = lm_eval.simple_evaluate(
        SpecBatchLM(engine(), "animals"), tasks=["animals"], task_manager=manager, bootstrap_iters=10
    )
    report = run_eval(engine(), EvalOptions("animals", output=tmp_path / "out"))
    found = {score.task: score for score in report.scores}
    assert list(found) == ["", "land", "cats", "dogs", "fish"]
    for name, score in found.items():
        part = name or "animals"
        numbers = theirs["groups"].get(part) or theirs["results"][part]
        assert score.value == numbers[f"{score.metric},none"]
        assert score.stderr == pytest.approx(numbers[f"{score.metric}_stderr,none"])
    assert [found[name].n for name in ("", "land", "cats", "dogs", "fish")] == [10, 8, 3, 5, 2]
    assert found["land"].value == pytest.approx((3 * found["cats"].value + 5 * found["dogs"].value) / 8)
    assert found[""].value != pytest.approx((8 * found["land"].value + 2 * found["fish"].value) / 10)
    assert [(row["doc_id"], row["task"]) for row in report.questions] == [
        *((n, "cats") for n in range(3)), *((n, "dogs") for n in range(3, 8)), *((n, "fish") for n in (8, 9))
    ]  # fmt: skip
    assert report.fewshot_source == ("the task's train rows" if report.num_fewshot else "none")
    loaded = EvalReport.load(tmp_path / "out")
    assert loaded == report
    assert loaded.overall == [found[""]]
    assert pick_score(loaded, None, None) == ("none", found[""].metric)
    changed = changes(loaded, run_eval(engine(""), EvalOptions("animals")), "none", found[""].metric)
    assert (changed.n, len(changed.lost) > 0) == (10, True)


def test_tag_has_no_score_of_its_own(animals: Path, make_engine: Any, tmp_path: Path) -> None:
    report = run_eval(make_engine(lambda prompt: "0"), EvalOptions("pets", limit=1))
    assert [score.task for score in report.scores] == ["cats", "dogs", "fish"]
    with pytest.raises(SpecbatchError, match="task='pets': has no score of its own"):
        pick_score(report, None, None)


def test_prompts_of_other_kinds_of_tasks_are_refused(other_tasks: None) -> None:
    with pytest.raises(SpecbatchError, match="task='choosy': is of type multiple_choice; use a task of type generate_"):
        task_prompts("choosy", None, as_messages=False)


def test_known_tasks_do_not_scan_lm_evals_folder(no_scan: None, scored_file: Path) -> None:
    load("gsm8k", data=scored_file)
    load("gsm8k_platinum", data=scored_file)
    load("one_digit_sums")


def test_imports_are_lazy() -> None:
    modules = "run, report, task, reasoning, tasks.one_digit_sums"
    code = "".join(f"import specbatch.evals.{name.strip()}\n" for name in modules.split(","))
    heavy = ("torch", "lm_eval", "datasets", "pandas", "transformers", "tabulate")
    code += f"import sys; print([name for name in {heavy} if name in sys.modules])"
    root = Path(specbatch.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_task_is_refused_without_parsing_all_definitions(no_scan: None) -> None:
    with pytest.raises(SpecbatchError, match=r"task='hellaswagg': no such task; did you mean hellaswag"):
        prepare(EvalOptions("hellaswagg"))
