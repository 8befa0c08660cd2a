"""Tasks of the user from YAML files: what they can have, and that no Python of theirs runs unless it is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from specbatch.errors import SpecbatchError
from specbatch.evals import task as module
from specbatch.evals.lm_eval_process import quiet
from specbatch.evals.options import EvalOptions
from specbatch.evals.run import run_eval
from specbatch.evals.task import EvalTask, load_task

UPSTREAM = Path(lm_eval.__file__).parent / "tasks"
BASE = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
PYTHON = """
from pathlib import Path
Path(__file__).with_name("it_ran").touch()
def rows(data):
    return data.select([0])
"""
SHELL = "{{ cycler.__init__.__globals__.os.system('touch %s') }}"


@pytest.fixture
def folder(tmp_path: Path, tasks_folder: Path) -> Path:
    """A folder with a base file of tasks and a Python file that leaves the file `it_ran`."""
    made = tmp_path / "mine"
    made.mkdir()
    rows = made / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"{n} + 1 =", "a": str(n + 1)}) + "\n" for n in range(3)))
    (made / "base.txt").write_text(BASE.format(rows=rows))
    (made / "code.py").write_text(PYTHON)
    return made


def write(folder: Path, text: str, name: str = "mine", kind: str = "task") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(
        f"{kind}: {name}\n" + ("" if "include" in text or kind == "group" else "include: base.txt\n") + text
    )
    return path


def load(folder: Path, name: str = "mine", **options: Any) -> EvalTask:
    return load_task(name, include_path=(folder,), **options)


def test_a_task_runs_by_its_name_and_by_its_file(folder: Path, make_engine: Any) -> None:
    path = write(folder, "num_fewshot: 0\n")
    for name, given in (("mine", (folder,)), (str(path), ())):
        report = run_eval(make_engine(lambda prompt: "2"), EvalOptions(name, include_path=given))
        assert (report.task, [score.value for score in report.scores], report.notes) == ("mine", [1 / 3], [])


def test_two_files_of_the_same_task_are_refused(folder: Path) -> None:
    path = write(folder, "")
    (folder / "other.yaml").write_text(path.read_text())
    with pytest.raises(SpecbatchError, match=r"^task='mine,mine': mine is given twice"):
        module.load_tasks([str(path), str(folder / "other.yaml")], EvalOptions("mine"))


@pytest.mark.parametrize("part", ["file", "rows", "member"])
def test_a_changed_task_is_another_evaluation(folder: Path, tmp_path: Path, make_engine: Any, part: str) -> None:
    """A complete folder has its results no longer, although the prompts may be the same."""
    path = write(folder, "")
    write(folder, "task: [mine]", "group", "group")
    engine = make_engine(lambda prompt: "2")
    options = EvalOptions("group" if part == "member" else "mine", include_path=(folder,), output=tmp_path / "out")
    report = run_eval(engine, options)
    assert run_eval(engine, options) == report
    assert len(engine.calls) == 1
    if part == "rows":
        rows = folder / "rows.jsonl"
        rows.write_text(rows.read_text().replace('"2"', '"3"'))
    else:
        path.write_text(path.read_text() + "target_delimiter: ''\n")
    with pytest.raises(SpecbatchError, match=r"^output=.*: exists and is not empty; name a new folder"):
        run_eval(engine, options)


def test_a_file_of_lm_evals_package_may_name_functions(folder: Path) -> None:
    """Its task executes answers only if the file says so, which a file that includes it cannot take back."""
    text = f"include: {UPSTREAM}/hendrycks_math/hendrycks_math_algebra.yaml\n"
    write(folder, text + "dataset_path: json\ndataset_name: null\ndataset_kwargs: {data_files: nothing.jsonl}\n")
    with pytest.raises(SpecbatchError, match=r"^task='mine': (its data cannot be read|lm-eval cannot load it here)"):
        load(folder)
    write(folder, f"include: {UPSTREAM}/humaneval/humaneval.yaml\nunsafe_code: false\n")
    with pytest.raises(SpecbatchError, match=r"^task=.mine.: executes code written by the model, .* allow it"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "process_docs: !function code.rows",
            "line 3, process_docs: '!function code.rows' would run Python, which is off",
        ),
        ("doc_to_text: !function code.rows", "line 3, doc_to_text: '!function code.rows'"),
        ("metric_list: [{metric: !function code.rows}]", "line 3, metric: '!function code.rows'"),
        ("fewshot_config: {samples: !function code.rows}", "line 3, samples: '!function code.rows'"),
        ("class: code.rows", "class: 'code.rows' would run Python"),
        ("process_docs: code.rows", "process_docs: 'code.rows' would run Python"),
        ("process_results: code.rows", "process_results: 'code.rows' would run Python"),
        ("custom_dataset: code.rows", "custom_dataset: 'code.rows' would run Python"),
        ("fewshot_config: {process_docs: x}", "fewshot_config: process_docs: 'x' would run Python"),
        (
            "metric_list: [{metric: ./code.py}]",
            "metric_list: metric: lm-eval has no metric './code.py' and would run a",
        ),
        ("metric_list: [{metric: exact_match, hf_evaluate: true}]", "metric_list: hf_evaluate: True would run Python"),
        ("dataset_kwargs: {trust_remote_code: true}", "dataset_kwargs: trust_remote_code: True would run Python"),
        ("dataset_path: pandas", "dataset_path: 'pandas' would run Python"),
        ("use_prompt: 'promptsource:*'", "use_prompt: 'promptsource:*' would run Python"),
        ("filter_list: [{name: x, filter: [{function: custom}]}]", "filter_list: function: 'custom' would run Python"),
        ("include: other.yaml", "other.yaml': line 1, process_docs: '!function code.rows' would run Python"),
        (
            "include: [base.txt, other.yaml]",
            "other.yaml': line 1, process_docs: '!function code.rows' would run Python",
        ),
        ("x: !!python/name:os.system", "cannot be read: line 3 is not valid YAML"),
        (
            "filter_list: [{name: x, filter: [{function: nosuch}]}]",
            "filter_list: no filter 'nosuch'; use custom, format_",
        ),
        ("metric_list: [{metric: exact_match, aggregation: nosuch}]", "metric_list: no aggregation 'nosuch'; use bits"),
        ("fewshot_config: {sampler: nosuch}", "fewshot_config: no sampler 'nosuch'; use default, first_n"),
        ("include: nothing.yaml", "nothing.yaml: No such file or directory"),
        ("include: mine.yaml", "cannot be read: ValueError: Include cycle at"),
        ("x: [", "cannot be read: line "),
        ("filter_list: [{name: x, filter: [{function: regex, regex_pattern: (}]}]", "filter x cannot be made: "),
        (
            "filter_list: [{name: x, filter: [{function: regex, nosuch: 1}]}]",
            "filter x cannot be made: TypeError: Regex",
        ),
        ("doc_to_text: '{{ q.__class__ }}'", "a template of it fails: SecurityError: access to attribute '__class__'"),
        ("doc_to_text: '{{ nosuch }}'", "a template of it fails: UndefinedError: 'nosuch' is undefined"),
        ("doc_to_text: '{{ q '", "a template of it fails: TemplateSyntaxError: unexpected end of template"),
        (
            "doc_to_text: '{% if a == \"3\" %}{{ nosuch }}{% endif %}'",
            "a template of it fails: UndefinedError: 'nosuch'",
        ),
        (
            "doc_to_target: '{{ [1] }}'\nnum_fewshot: 1",
            "its prompts cannot be built (AssertionError: Answer is not a str",
        ),
        ("test_split: nosuch", "lm-eval cannot load it: its definition names 'nosuch', which does not exist"),
        (
            "nosuch: 1",
            "lm-eval cannot load it (TypeError: TaskConfig.__init__() got an unexpected keyword argument 'nosu",
        ),
        ("dataset_kwargs: {data_files: {test: no.jsonl}}", "its data cannot be read (Unable to find "),
        ("dataset_path: '.'\ndataset_kwargs: {}", "lm-eval cannot load it"),
        ("dataset_path: [json]", "lm-eval cannot load it"),
        ("metric_list: [{metric: [a]}]", "metric_list: metric: lm-eval has no metric ['a'] and would run a script"),
        ("metric_list: [{metric: acc}]", "its answers cannot be scored (TypeError: unsupported operand type(s)"),
        (
            "filter_list: [{name: x, filter: [{function: multi_choice_regex}, {function: take_first}]}]",
            "its answers cannot be scored (KeyError: 'choices'); correct it",
        ),
        ("filter_list: []", "filter_list is empty, so that nothing is scored"),
        ("repeats: 0", "repeats: 0 is no whole number of at least 1"),
        ("repeats: x", "repeats: 'x' is no whole number of at least 1"),
        ("tag: 5", "mine.yaml': cannot be read: TypeError: 'int' object is not iterable"),
    ],
)
def test_refused_definitions(
    folder: Path, text: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.yaml").write_text("process_docs: !function code.rows\n")
    monkeypatch.chdir(folder)
    write(folder, text)
    with pytest.raises(SpecbatchError) as refused:
        load(folder)
    assert complaint in str(refused.value)
    assert str(refused.value).startswith("task='")
    assert "\n" not in str(refused.value)
    assert not (folder / "it_ran").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("task: [mine, nothere]", "task='group': group group names task nothere, which does not exist"),
        ("task: [mine, {task: nothere}]", "task='group': group group names task nothere, which does not exist"),
        (
            "task: [{group: inner, task: [nothere]}]",
            "task='group': group inner names task nothere, which does not exist",
        ),
        ("task: [mine, {group: nothere}]", "task='group': group group names task nothere, which does not exist"),
        ("task: [mine, group]", "task='group': group group contains itself"),
        ("task: []", "group.yaml': group group needs a list of tasks"),
        ("task: mine", "group.yaml': group group needs a list of tasks"),
        ("task: [{task: x, dataset_path: json, process_docs: f}]", "group.yaml': process_docs: 'f' would run Python"),
        ("task: [{group: x, task: [{task: mine, class: f}]}]", "group.yaml': class: 'f' would run Python"),
        ("task: [mine]\nmetric_list: [{metric: nosuch}]", "group.yaml': metric_list: metric: lm-eval has no metric"),
        ("task: [code]", "code.yaml': line 3, process_docs: '!function code.rows' would run Python"),
        (
            "task: [mine]\naggregate_metric_list: exact_match",
            "task='group': its answers cannot be scored (AttributeErr",
        ),
        ("task: [{task: mine, metric_list: [{metric: acc}]}]", "task='mine': its answers cannot be scored (TypeError"),
    ],
)
def test_refused_groups(folder: Path, text: str, complaint: str) -> None:
    write(folder, "")
    write(folder, "process_docs: !function code.rows", "code")
    write(folder, text, "group", "group")
    with pytest.raises(SpecbatchError) as refused:
        load(folder, "group")
    assert complaint in str(refused.value)
    assert not (folder / "it_ran").exists()


@pytest.mark.parametrize("text", ["task: [{task: mine, process_results: null}]", "task: [mine]\nprocess_results:"])
def test_a_group_cannot_make_a_metrics_script_run(folder: Path, tasks_folder: Path, text: str) -> None:
    """A task with a function of lm-eval for its results never calls its metrics, whose names can be any."""
    for place in ("own", "own/own"):
        (folder / place).mkdir()
    (folder / "own" / "own.py").write_text(PYTHON)
    (tasks_folder / "code.py").write_text("def results(doc, answers):\n    return {'own': 1.0}\n")
    (tasks_folder / "trusted.yaml").write_text("process_results: !function code.results\n")
    metrics = f"metric_list: [{{metric: {folder}/own, aggregation: mean, higher_is_better: true}}]"
    write(folder, f"include: [base.txt, {tasks_folder}/trusted.yaml]\n{metrics}\n")
    write(folder, f"{text}\n", "group", "group")
    with pytest.raises(SpecbatchError, match=r"^task='group': metric_list: metric: lm-eval has no metric .*own."):
        load(folder, "group")
    assert not (folder / "own" / "it_ran").exists()


def test_metrics_that_are_not_computed_are_noted(folder: Path) -> None:
    write(folder, "output_type: loglikelihood\ngeneration_kwargs: null\nmetric_list: [{metric: acc}, {metric: bleu}]")
    assert load(folder).notes == ("metric bleu is not computed: mine is of type loglikelihood",)
    write(folder, "task: [mine]\naggregate_metric_list: [{metric: acc}, {metric: nosuch}]", "group", "group")
    assert load(folder, "group").notes[1:] == (
        "group group has no nosuch: none of its tasks has this metric and filter",
    )


@pytest.mark.parametrize("name", ["5", "null"])
def test_a_name_that_is_no_text_is_refused(folder: Path, name: str) -> None:
    """lm-eval fails for every task then."""
    write(folder, "")
    (folder / "other.yaml").write_text(f"task: {name}\n")
    with pytest.raises(SpecbatchError, match=r"^include_path='.*other.yaml': the name of a task is (5|None), "):
        load(folder)


def test_a_bad_file_does_not_hide_other_tasks(folder: Path) -> None:
    write(folder, "")
    write(folder, "x: [", "bad")
    write(folder, "process_docs: !function code.rows", "code")
    assert load(folder).name == "mine"
    with pytest.raises(SpecbatchError, match=r"^task='nothing': no such task; use gsm8k"):
        load(folder, "nothing")
    with pytest.raises(SpecbatchError, match=r"^include_path='.*nothing': is no folder"):
        load(folder / "nothing")
    with pytest.raises(SpecbatchError, match=r"^task='nothing.yaml': cannot be read: .*nothing.yaml: No such file"):
        load_task("nothing.yaml")
    assert not (folder / "it_ran").exists()


def test_a_name_that_two_files_define_is_refused(folder: Path, tmp_path: Path) -> None:
    """lm-eval takes the first one of a folder; of several folders the last one that has it."""
    write(folder, "")
    (tmp_path / "later").mkdir()
    path = tmp_path / "later" / "other.yaml"
    path.write_text(
        (folder / "mine.yaml").read_text().replace("base.txt", str(folder / "base.txt")) + "num_fewshot: 1\n"
    )
    assert load_task("mine", include_path=(folder, tmp_path / "later")).num_fewshot == 1
    path.rename(folder / "other.yaml")
    with pytest.raises(
        SpecbatchError, match=r"^task='mine': is defined in .*mine.yaml and in .*other.yaml; rename one"
    ):
        load(folder)


def test_groups_cannot_hide_that_a_task_executes_answers(folder: Path, tasks_folder: Path) -> None:
    (tasks_folder / "unsafe.yaml").write_text("task: unsafe\nunsafe_code: true\n")
    (tasks_folder / "code.yaml").write_text("group: code\ntask: [unsafe, not_there]\n")
    for member in ("{task: unsafe, unsafe_code: false}", "{group: code, unsafe_code: false}"):
        write(folder, f"task: [{member}]", "group", "group")
        with pytest.raises(SpecbatchError, match=r"^task='unsafe': executes code written by the model"):
            load(folder, "group")


def test_python_runs_if_it_is_allowed(folder: Path) -> None:
    write(folder, "process_docs: !function code.rows\ndoc_to_text: '{{ q.__class__ }}'")
    loaded = load(folder, confirm_run_unsafe_code=True)
    assert (folder / "it_ran").exists()
    assert loaded.sizes == {"mine": 1}


def test_templates_cannot_run_commands(folder: Path, tasks_folder: Path) -> None:
    """Neither of a user's task nor of lm-eval's, and neither where a question is shown first."""
    ran = folder / "it_ran"
    for key in ("doc_to_text", "doc_to_target", "description", "gen_prefix", "doc_to_choice"):
        write(folder, f'{key}: "{SHELL % ran}"')
        with pytest.raises(SpecbatchError, match="a template of it fails: SecurityError"):
            load(folder)
    assert not ran.exists()


def test_the_sandbox_renders_what_lm_eval_renders() -> None:
    """Every text of lm-eval's own tasks that is a template without functions, over one document."""
    from lm_eval import utils

    doc = {name: f"{name} [1]. {{x}}" for name in ("question", "q", "text", "passage", "answer", "sentence", "input")}
    doc |= {"choices": {"text": ["a", "b"], "label": ["A", "B"]}, "options": ["a", "b"], "n": 3}  # type: ignore[dict-item]
    texts = {
        "Question: {{question.strip()}}\nAnswer:",
        "{{choices.text | join(', ')}} {{choices['label'][0]}} {{options[n - 2]}}",
        "{% for label in choices.label %}({{label}}) {{choices.text[loop.index0]}}\n{% endfor %}",
        "{{ '%s-%s' | format(q, n) }} {{ '{} {}'.format(q, n) }} {{q[0] | upper}}",
        "{{ text | regex_replace('t.x', 'y') | replace('[1]', '') }}\n",
        "{% set made = namespace(items=[]) %}{% set _ = made.items.append(n) %}{{ made.items }}",
        "{{ ['a', 'b'].index(options[1]) }}{{ options | length }}{{ {'A': 0}['A'] }}",
    }
    plain = {text: utils.apply_template(text, doc) for text in texts}
    with quiet():
        assert {text: utils.apply_template(text, doc) for text in texts} == plain


def test_the_users_task_replaces_lm_evals(folder: Path, tasks_folder: Path) -> None:
    (tasks_folder / "mine.yaml").write_text("task: mine\ndataset_path: other\n")
    write(folder, "")
    loaded = load(folder)
    assert loaded.sizes == {"mine": 3}
    assert loaded.notes == (f"task mine of {folder / 'mine.yaml'} replaces lm-eval's task of this name",)


def test_names_of_the_users_folders_are_found_without_a_scan(
    folder: Path, no_scan: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "names_in", lambda *_: (set(), []))
    write(folder, "")
    write(folder, "task: [mine, one_digit_sums]", "group", "group")
    assert list(load(folder, "group").tasks) == ["mine", "one_digit_sums"]
    assert len(no_scan) == 1
