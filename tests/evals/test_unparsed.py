"""Answers without a finding, for one filter chain of each kind that lm-eval's tasks have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.filters import build_filter_ensemble

from specbatch.evals.run import EvalOptions, run_eval
from specbatch.evals.unparsed import observe_filters, unparsed_share

NUMBER = ("regex", {"regex_pattern": r"(\d)"})
FIRST, VOTE = ("take_first", None), ("majority_vote", None)
DOC = {"choices": ["red", "blue"], "input": "(A) red\n(B) blue\nList: red blue"}


def _of_bbh(name: str) -> Any:
    """The class of a filter that tasks of BBH define, in a module whose import takes half a second."""
    if not name.endswith("Filter"):
        return name
    from lm_eval.tasks.bbh.cot_zeroshot import utils

    return getattr(utils, name)


def filtered(steps: list[Any], *answers: list[str]) -> tuple[list[Any], float | None]:
    """What a chain of filters makes of the answers to each question, and the share without a finding. The values are
    those of the same chain when it is not observed."""
    made = {}
    for observed in (False, True):
        built = build_filter_ensemble("one", [(_of_bbh(name), settings) for name, settings in steps])
        task = SimpleNamespace(_filters=[built])
        if observed:
            observe_filters(task)
        questions = [Instance("generate_until", DOC, (), 0, resps=list(own)) for own in answers]
        task._filters[0].apply(questions)
        made[observed] = [question.filtered_resps["one"] for question in questions]
    assert made[True] == made[False]
    assert not any(type(value).__name__ == "_Nothing" for value in made[True])
    return made[True], unparsed_share([task], "one")


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        ([NUMBER, FIRST], 0.5),
        ([("regex", NUMBER[1] | {"fallback": "1"}), FIRST], 0.5),  # which the first answer has
        ([("regex", NUMBER[1] | {"fallback": None}), FIRST], 0.5),
        ([("regex", {"regex_pattern": r"()(\d?)$"}), FIRST], 0.5),  # a match without any group
        ([("regex", NUMBER[1] | {"group_select": -1}), FIRST], 0.5),
        ([("regex", {"regex_pattern": "(.*)"}), FIRST], 0.0),
        ([NUMBER, ("map", {"mapping_dict": {"1": 0}, "default_value": -1}), FIRST], 0.5),
        ([NUMBER, FIRST, ("map", {"mapping_dict": {"1": 0}, "default_value": -1}), FIRST], 0.5),  # polemo2
        ([NUMBER, ("lowercase", None), ("remove_whitespace", None), FIRST], 0.5),
        ([NUMBER, ("uppercase", None), FIRST], 0.5),
        ([("lowercase", None), NUMBER, ("take_first_k", {"k": 1})], 0.5),  # simple_cooccurrence_bias
        ([("regex", {"regex_pattern": "(.1)"}), ("remove_whitespace", None), NUMBER, FIRST], 0.5),
        ([("regex", {"regex_pattern": "(.1)", "fallback": "7"}), NUMBER, FIRST], 0.5),  # found in the fallback only
        ([NUMBER, ("custom", {"filter_fn": lambda answers, docs: [own * 1 for own in answers]})], 0.5),
        ([NUMBER, ("custom", {"filter_fn": lambda answers, docs: [own[0] for own in answers]})], 0.5),
        ([("MapRegexFilter", {"regex_pattern_to_value": {r"\d": "[invalid]"}}), FIRST], 0.5),
        ([("multi_choice_regex", {"regex_pattern": r"(\d)"}), FIRST], 0.5),
        ([("regex_pos", None)], 1.0),
        ([FIRST], None),
        ([("remove_whitespace", None), FIRST], None),
        ([("WordSortFilter", {}), FIRST], None),
        ([("format_span", None)], None),
        ([("custom", {"filter_fn": lambda answers, docs: answers})], None),
        ([], None),
    ],
)  # fmt: skip
def test_one_answer_of_two_has_no_finding(steps: list[Any], share: float | None) -> None:
    assert filtered(steps, ["x1"], ["none"])[1] == share


@pytest.mark.parametrize("letter", ["multi_choice_regex", "MultiChoiceRegexFilter"])
def test_choices_are_found_by_their_text(letter: Any) -> None:
    steps = [(letter, {"regex_pattern": r"is (\([AB]\))"}), ("lowercase", None), FIRST]
    answers = ["it is (A)"], ["blue, of course"], [": B"], ["dunno"]
    assert filtered(steps, *answers) == (["(a)", "(b)", "(b)", "[invalid]"], 0.25)


def test_tags_are_found() -> None:
    assert filtered([("regex_pos", None)], ["[('a', 'NOUN')]"], ["a noun"]) == ([[["NOUN"]], [["invalid"]]], 0.5)


def test_only_answers_that_are_scored_count() -> None:
    answers = ["1", "no", "no"], ["no", "1", "1"], ["no", "2", "no"], ["no", "1", "2"]
    assert filtered([NUMBER, FIRST], *answers) == (["1", *["[invalid]"] * 3], 0.75)
    assert filtered([NUMBER, VOTE, FIRST], *answers) == (["[invalid]", "1", "[invalid]", "[invalid]"], 0.75)
    first_two = [("take_first_k", {"k": 2}), NUMBER, VOTE, FIRST]
    assert filtered(first_two, *answers) == (["1", "[invalid]", "[invalid]", "[invalid]"], 0.75)
    assert filtered([NUMBER], *answers)[1] == pytest.approx(0.5)
    assert filtered([NUMBER, ("take_first_k", {"k": 2})], *answers)[1] == 0.5


def test_a_vote_counts_if_all_its_voters_found_nothing() -> None:
    zero = ("regex", NUMBER[1] | {"fallback": "0"})
    values, share = filtered([zero, VOTE, FIRST], ["no", "no", "1"], ["no", "it is 0", "1"], ["1", "1", "no"])
    assert (values, share) == (["0", "0", "1"], pytest.approx(1 / 3))


def test_unknown_where_a_filter_chooses_among_answers() -> None:
    last = ("custom", {"filter_fn": lambda answers, docs: [own[-1] for own in answers]})
    assert filtered([NUMBER, last], ["1", "no"], ["1", "1"])[1] is None


TASK = """
task: {name}
output_type: generate_until
custom_dataset: !function numbers.splits
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{q}}}}"
generation_kwargs: {{until: ["\\n"]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list: [{{name: number, filter: {chain}}}]
"""
ROWS = """
from datasets import Dataset, DatasetDict
def splits(**_):
    return DatasetDict(test=Dataset.from_list([{"q": f"{n}"} for n in range(4)]))
"""


def test_share_of_a_task_and_of_a_group(tasks_folder: Any, make_engine: Any) -> None:
    (tasks_folder / "numbers.py").write_text(ROWS)
    found = "{function: regex, regex_pattern: '([0-3])', fallback: '0'}"
    chains = {
        "found": f"[{found}, {{function: take_first}}]",
        "mapped": f"[{found}, {{function: map, mapping_dict: {{'0': none}}, default_value: '1'}}, "
        "{function: take_first}]",
    }
    for name, chain in chains.items():
        (tasks_folder / f"{name}.yaml").write_text(TASK.format(name=name, chain=chain))
    (tasks_folder / "both.yaml").write_text(
        "group: both\ntask: [found, mapped]\naggregate_metric_list: [{metric: exact_match, filter_list: number}]\n"
    )
    report = run_eval(make_engine(lambda prompt: prompt[-1] if prompt[-1] in "01" else "dunno"), EvalOptions("both"))
    assert {score.task: (score.value, score.unparsed) for score in report.scores} == {
        "": (0.375, 0.5), "found": (0.5, 0.5), "mapped": (0.25, 0.5),
    }  # fmt: skip
