"""The cases: a task, the options of specbatch and the arguments of lm-eval that mean the same, and a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from against_lm_eval.models import (
    BRIEF,
    BUNDLED,
    CLEANED,
    CONCLUDES,
    NO_SYSTEM,
    OUTER_BOS,
    PENALTY,
    REASONS,
    SAMPLES,
    SHORT,
    TRIMS,
)

Options = Mapping[str, Any]
ASPECTS = ("prompts", "limits", "answers", "filtered", "metrics", "scores", "counts")
ASKED = ("prompts", "limits", "counts")


@dataclass(frozen=True)
class Case:
    """An evaluation, as both sides are asked for it.

    tasks    names, of GSM8K's tasks or of `TASKS`
    ours     fields of EvalOptions
    theirs   arguments of lm_eval.simple_evaluate
    hflm     arguments of its backend
    spec     fields of Speculation
    aspects  of `runs.Found` that are compared; of sampled answers none that depends on random numbers
    differs  aspects in which the two differ, as docs/evaluation.md says
    why      what differs
    option   of specbatch that reproduces lm-eval, of which another case shows that it does
    quick    whether the quick tests run it
    """

    name: str
    tasks: tuple[str, ...]
    ours: Options = field(default_factory=dict)
    theirs: Options = field(default_factory=dict)
    model: str = "tiny"
    hflm: Options = field(default_factory=dict)
    spec: Options = field(default_factory=dict)
    aspects: tuple[str, ...] = ASPECTS
    differs: tuple[str, ...] = ()
    why: str = ""
    option: str = ""
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.model}"


# Rows --------------------------------------------------------------------------------------------------------------

_COLORS = ("red", "blue", "green", "grey")
_WORDS = ("café", "naïve", "東京", "☃", "x²", "tea", "a  b", "\ttab", "été", "end")


def _row(n: int, word: str) -> dict[str, Any]:
    return {
        "question": f"Ann has {n} pears and eats {n % 2 + 1} of them. How many are left? ({word})",
        "answer": str(n - n % 2 - 1),
        "color": n % 4,
        "choices": list(_COLORS),
        "long": " ".join(f"On day {day} Ann bought {day * n} eggs and {word}." for day in range(1, 2 + 18 * (n % 3))),
    }


TEST = [_row(n, word) for n, word in enumerate(_WORDS, start=5)]
TRAIN = [_row(n, "train") for n in range(20, 32)]
ROWS = {"train": TRAIN, "test": TEST}

# Tasks -------------------------------------------------------------------------------------------------------------

_DATA = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"train": "FOLDER/train.jsonl", "test": "FOLDER/test.jsonl"}},
    "training_split": "train",
    "test_split": "test",
    "metadata": {"version": 2.5},
}
_EXACT = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
_GREEDY = {"do_sample": False, "temperature": 0.0}
_WRITES: dict[str, Any] = {
    **_DATA,
    "output_type": "generate_until",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_target": "{{answer}}",
    "num_fewshot": 2,
    "generation_kwargs": {"until": ["\n\n", "Q:"], "max_gen_toks": 40, **_GREEDY},
    "metric_list": [_EXACT],
}
_CHOOSES: dict[str, Any] = {
    **_DATA,
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}\nThe color is",
    "doc_to_choice": list(_COLORS),
    "doc_to_target": "color",
    "num_fewshot": 0,
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}


def _regex(pattern: str, **more: Any) -> dict[str, Any]:
    return {"function": "regex", "regex_pattern": pattern, **more}


def _generation(**more: Any) -> dict[str, Any]:
    return {"generation_kwargs": {"max_gen_toks": 40, **_GREEDY, **more}}


_FIRST = {"function": "take_first"}
_FILTERS = {
    "filters": [
        {"name": "first-word", "filter": [_regex(r"(\w+)"), _FIRST]},
        {"name": "last-word", "filter": [_regex(r"(\w+)", group_select=-1), _FIRST]},
        {"name": "either", "filter": [_regex(r"(#+)|(\d)", fallback="none"), _FIRST]},
        {"name": "lower", "filter": [{"function": "lowercase"}, {"function": "remove_whitespace"}, _FIRST]},
        {"name": "upper", "filter": [{"function": "uppercase"}, _FIRST]},
        {
            "name": "mapped",
            "filter": [
                _regex(r"([a-z])"),
                {"function": "map", "mapping_dict": {"e": "5", "a": "7"}, "default_value": "0"},
                _FIRST,
            ],
        },
    ]
}
_REPEATED = {
    "repeats": 3,
    "filter_list": [
        {"name": "first", "filter": [_FIRST]},
        {"name": "first-two", "filter": [{"function": "take_first_k", "k": 2}, {"function": "majority_vote"}, _FIRST]},
        {"name": "most", "filter": [_regex(r"(\w)"), {"function": "majority_vote"}, _FIRST]},
    ],
}
_LETTERS = {
    "doc_to_text": "Q: {{question}}\n(A) red (B) blue (C) green (D) grey\nA:",
    "doc_to_target": "{{['(A)', '(B)', '(C)', '(D)'][color]}}",
    "filter_list": [
        {
            "name": "letter",
            "filter": [
                {
                    "function": "multi_choice_regex", "group_select": 0, "ignore_case": True, "ignore_punctuation": True,
                    "regex_pattern": r"(\([A-Z]\))",
                },
                _FIRST,
            ],
        }
    ],
}  # fmt: skip

TASKS: dict[str, dict[str, Any]] = {
    "writes": _WRITES,
    "no_limit": _WRITES | {"generation_kwargs": {"until": ["Q:"], **_GREEDY}},
    "no_arguments": {name: value for name, value in _WRITES.items() if name != "generation_kwargs"},
    "until_text": _WRITES | _generation(until="e"),
    "until_none": _WRITES | _generation(until=[]),
    "until_end": _WRITES | _generation(until=["<|im_end|>", "</s>"]),
    "until_in_a_token": _WRITES | _generation(until=["a", "ow", "ll"]),
    "until_several_tokens": _WRITES | _generation(until=["s en", "te", "e \n", "enday"]),
    "other_name_of_the_limit": _WRITES | {"generation_kwargs": {"max_new_tokens": 24, "until": ["Q:"], "do_sample": False}},
    "temperature_without_sampling": _WRITES | {"generation_kwargs": {"until": ["Q:"], "max_gen_toks": 24}},
    "described": _WRITES | {"description": "Answer with a number.\n\n"},
    "described_choices": _CHOOSES | {"description": "Name a color.\n\n"},
    "begins_with_bos": _WRITES | {"doc_to_text": "<s>Q: {{question}}\nA:", "num_fewshot": 0},
    "described_by_row": _WRITES | {"description": "This is about {{question[:3]}}.\n"},
    "begun_by_row": _WRITES | {"gen_prefix": "{{question[:9]}}"},
    "begun_choices": _CHOOSES | {"gen_prefix": "It is the color", "num_fewshot": 2},
    "no_context": _DATA
    | {
        "output_type": "loglikelihood", "doc_to_text": "", "doc_to_target": "{{question}}", "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "several_contexts": _CHOOSES
    | {
        "doc_to_text": "color", "doc_to_choice": "{{[question ~ ' Red', question ~ ' Blue', 'Green', 'Grey']}}",
        "doc_to_target": "is the color of the box.",
    },
    "choices_as_text": _CHOOSES | {"doc_to_choice": "{{choices}}", "doc_to_text": "{{question}} Color: "},
    "several_targets": _CHOOSES | {"doc_to_target": "{{[color, (color + 1) % 4]}}", "metric_list": _CHOOSES["metric_list"][:1]},
    "target_of_choices": _WRITES | {"doc_to_choice": list(_COLORS), "doc_to_target": "color"},
    "until_characters": _WRITES | _generation(until=["\ufffd", "é", "東"]),
    "until_letters_and_spaces": _WRITES | _generation(until=[" s", "e ", "in", "o"]),
    "own_shots": _WRITES
    | {"fewshot_config": {"doc_to_text": "Example: {{question}}", "doc_to_target": "({{answer}})", "sampler": "first_n"}},
    "included": {"include": "writes.yaml", "num_fewshot": 1, "doc_to_text": "Problem: {{question}}\nSolution:"},
    "repeated_samples": _WRITES
    | {"repeats": 2, "generation_kwargs": {"until": ["Q:"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}},
    "begun": _WRITES | {"gen_prefix": "The answer is"},
    "begun_with_spaces": _WRITES | {"gen_prefix": " The answer is: "},
    "delimited": _WRITES | {"fewshot_delimiter": "\n---\n", "target_delimiter": " => "},
    "first_examples": _WRITES | {"fewshot_config": {"sampler": "first_n"}, "num_fewshot": 4},
    "fixed_examples": _WRITES
    | {"fewshot_config": {"sampler": "first_n", "samples": [{"question": "1 and 1?", "answer": "2"}] * 2}},
    "examples_of_the_scored_rows": {
        name: value for name, value in (_WRITES | {"fewshot_split": "test"}).items() if name != "training_split"
    },
    "no_examples": _WRITES | {"num_fewshot": 0},
    "unset_examples": {name: value for name, value in _WRITES.items() if name != "num_fewshot"},
    "filtered": _WRITES | {"filter_list": _FILTERS["filters"]},
    "repeated": _WRITES | _REPEATED,
    "letters": _WRITES | _LETTERS,
    "compared": _WRITES
    | {
        "metric_list": [
            _EXACT | {"ignore_case": True, "ignore_punctuation": True, "regexes_to_ignore": [r"\s"]},
            {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True},
            {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True},
            {"metric": "ter", "aggregation": "ter", "higher_is_better": False},
        ]
    },
    "penalized": _WRITES | _generation(repetition_penalty=1.4, until=["Q:"]),
    "chooses": _CHOOSES,
    "chooses_with_examples": _CHOOSES | {"num_fewshot": 3},
    "chooses_of_the_row": _CHOOSES | {"doc_to_choice": "choices", "target_delimiter": ""},
    "more_metrics": _CHOOSES
    | {
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_bytes", "aggregation": "mean", "higher_is_better": True},
            {"metric": "mcc", "aggregation": "matthews_corrcoef", "higher_is_better": True},
            {"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False},
        ]
    },
    "mutual_information": _CHOOSES
    | {"metric_list": [{"metric": "acc_mutual_info", "aggregation": "mean", "higher_is_better": True}]},
    "likely": _DATA
    | {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{answer}} apples",
        "num_fewshot": 0,
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "likely_texts": _DATA
    | {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
    },
    "long_context": _CHOOSES | {"doc_to_text": "{{long}} {{question}}\nThe color is"},
    "long_prompts": _WRITES | {"doc_to_text": "{{long}}\nQ: {{question}}\nA:", "num_fewshot": 0},
    "sampled": _WRITES | {"generation_kwargs": {"until": ["Q:"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.7}},
    "sampled_more": _WRITES
    | {
        "generation_kwargs": {
            "until": ["Q:"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 20,
        }
    },
}  # fmt: skip
for _name, _task in TASKS.items():
    TASKS[_name] = {"task": _name, **_task}

_MEAN = {"metric": "acc", "aggregation": "mean"}
GROUPS: dict[str, dict[str, Any]] = {
    "weighed": {
        "group": "weighed",
        "task": ["chooses", "chooses_with_examples"],
        "aggregate_metric_list": [_MEAN | {"weight_by_size": True}],
    },
    "even": {
        "group": "even",
        "task": ["chooses", "chooses_of_the_row"],
        "aggregate_metric_list": [_MEAN | {"weight_by_size": False}],
    },
    "nested": {
        "group": "nested",
        "task": ["even", "more_metrics"],
        "aggregate_metric_list": [_MEAN | {"weight_by_size": True}],
    },
    "tagged_1": _WRITES | {"task": "tagged_1", "tag": "tagged", "num_fewshot": 0},
    "tagged_2": _CHOOSES | {"task": "tagged_2", "tag": "tagged"},
    "mixed": {"group": "mixed", "task": ["writes", "chooses", "likely_texts"]},
}

# Cases -------------------------------------------------------------------------------------------------------------

_THREE = {"ours": {"limit": 3}, "theirs": {"limit": 3}}
_NGRAM = {"algorithm": "ngram"}


def _case(name: str, task: str, ours: Options | None = None, theirs: Options | None = None, **more: Any) -> Case:
    """A case of at most three questions."""
    return Case(name, (task,), {"limit": 3, **(ours or {})}, {"limit": 3, **(theirs or {})}, **more)


_CHAT = {"chat_template": True}
_THEIR_CHAT = {"apply_chat_template": True}
_SYSTEM = {"system_instruction": "You are a careful clerk."}
_ONE, _MANY = {"fewshot_as_multiturn": False}, {"fewshot_as_multiturn": True}
_BOS, _NO_BOS = {"add_bos_token": True}, {"add_bos_token": False}

CASES = [
    # GSM8K
    _case("gsm8k, 5 examples", "gsm8k"),
    _case("gsm8k, no examples", "gsm8k", {"num_fewshot": 0}, {"num_fewshot": 0}),
    _case("gsm8k, 3 examples, another seed", "gsm8k", {"num_fewshot": 3, "seed": 7}, {"num_fewshot": 3, "fewshot_random_seed": 7}),
    _case("gsm8k_platinum, 5 examples", "gsm8k_platinum"),
    _case("gsm8k_platinum, no examples", "gsm8k_platinum", {"num_fewshot": 0}, {"num_fewshot": 0}),
    _case("gsm8k_cot", "gsm8k_cot"),
    _case("gsm8k_cot_zeroshot", "gsm8k_cot_zeroshot"),
    _case("gsm8k_platinum_cot", "gsm8k_platinum_cot"),
    _case("gsm8k, v1 with n-gram drafts", "gsm8k", spec={**_NGRAM, "schedule": "v1"}),
    _case("gsm8k, v2 with n-gram drafts", "gsm8k", spec={**_NGRAM, "schedule": "v2"}),
    _case("gsm8k, v2 with another model's drafts", "gsm8k", spec={"algorithm": "standalone", "draft": "self:skip=1-1"}),
    _case("gsm8k, chat", "gsm8k", _CHAT, _THEIR_CHAT),
    _case("gsm8k_cot_zeroshot, chat", "gsm8k_cot_zeroshot", _CHAT, _THEIR_CHAT),
    # limits and stop strings
    _case("limit of the task", "writes"),
    _case("no limit: 256", "no_limit"),
    _case("no generation arguments", "no_arguments"),
    _case("limit as max_new_tokens", "other_name_of_the_limit"),
    _case("limit of the user", "writes", {"max_new_tokens": 17}, {"gen_kwargs": {"max_gen_toks": 17}}),
    _case("until: one text", "until_text"),
    _case("until: nothing", "until_none"),
    _case("until: names of special tokens", "until_end"),
    _case("until: within a token", "until_in_a_token"),
    _case("until: several tokens", "until_several_tokens"),
    _case("until: within a token, v2 with drafts", "until_in_a_token", spec={**_NGRAM, "schedule": "v2"}, quick=True),
    _case("neither do_sample nor temperature", "temperature_without_sampling"),
    # prompts
    _case("a description", "described"),
    _case("the answer is begun (gen_prefix)", "begun"),
    _case("delimiters", "delimited"),
    _case("the first examples", "first_examples"),
    _case("fixed examples", "fixed_examples"),
    _case("examples of the scored rows", "examples_of_the_scored_rows"),
    _case("no number of examples in the task", "unset_examples"),
    _case("no number of examples in the task, 2 asked for", "unset_examples", {"num_fewshot": 2}, {"num_fewshot": 2}),
    # chat
    _case("chat", "writes", _CHAT, _THEIR_CHAT),
    _case("chat, a description", "described", _CHAT, _THEIR_CHAT, quick=True),
    _case("chat, a system instruction", "writes", _CHAT | _SYSTEM, _THEIR_CHAT | _SYSTEM),
    _case("chat, a system instruction and a description", "described", _CHAT | _SYSTEM, _THEIR_CHAT | _SYSTEM),
    _case("a system instruction without chat", "described", _SYSTEM, _SYSTEM),
    _case("chat, examples in one message", "writes", _CHAT | _ONE, _THEIR_CHAT | _ONE),
    _case("chat, examples in one message, a description", "described", _CHAT | _ONE, _THEIR_CHAT | _ONE),
    _case("chat, examples in several messages, asked for", "writes", _CHAT | _MANY, _THEIR_CHAT | _MANY),
    _case("chat, the answer is begun", "begun", _CHAT, _THEIR_CHAT),
    _case("chat, the answer is begun, examples in one message", "begun", _CHAT | _ONE, _THEIR_CHAT | _ONE),
    _case("chat, the answer is begun, ends in a space", "begun_with_spaces", _CHAT, _THEIR_CHAT),
    _case("chat, the answer is begun", "begun", _CHAT, _THEIR_CHAT, model=TRIMS),
    _case("chat, the answer is begun, ends in a space", "begun_with_spaces", _CHAT, _THEIR_CHAT, model=TRIMS),
    _case("chat, a system instruction", "writes", _CHAT | _SYSTEM, _THEIR_CHAT | _SYSTEM, model=NO_SYSTEM),
    _case("chat, a description", "described", _CHAT, _THEIR_CHAT, model=NO_SYSTEM),
    _case("chat, a description, multiple choice", "described_choices", _CHAT, _THEIR_CHAT, model=NO_SYSTEM),
    _case("chat", "writes", _CHAT, _THEIR_CHAT, model=OUTER_BOS),
    _case("chat, multiple choice", "chooses_with_examples", _CHAT, _THEIR_CHAT, model=OUTER_BOS),
    _case("chat, add_bos_token off", "writes", _CHAT | _NO_BOS, _THEIR_CHAT, model=OUTER_BOS, hflm=_NO_BOS),
    _case("chat, add_bos_token on", "writes", _CHAT | _BOS, _THEIR_CHAT, model=OUTER_BOS, hflm=_BOS),
    _case("chat, add_bos_token on", "writes", _CHAT | _BOS, _THEIR_CHAT, hflm=_BOS),
    _case("add_bos_token off", "writes", _NO_BOS, hflm=_NO_BOS),
    _case("add_bos_token off, multiple choice", "chooses", _NO_BOS, hflm=_NO_BOS),
    _case("add_bos_token off, loglikelihood_rolling", "likely_texts", _NO_BOS, hflm=_NO_BOS),
    _case("the prompt begins with BOS", "begins_with_bos"),
    _case("chat, no BOS", "writes", _CHAT, _THEIR_CHAT, model="tiny without BOS"),
    _case("no BOS", "writes", model="tiny without BOS"),
    _case("chat, multiple choice", "chooses_with_examples", _CHAT, _THEIR_CHAT),
    _case("a description of the row", "described_by_row"),
    _case("the answer is begun by the row", "begun_by_row"),
    _case("the answer is begun, ends in a space", "begun_with_spaces"),
    _case("the answer is begun, multiple choice", "begun_choices"),
    _case("chat, a description of the row", "described_by_row", _CHAT, _THEIR_CHAT),
    _case("chat, the answer is begun by the row", "begun_by_row", _CHAT, _THEIR_CHAT),
    _case("chat, the answer is begun, multiple choice", "begun_choices", _CHAT, _THEIR_CHAT),
    _case("chat, fixed examples", "fixed_examples", _CHAT, _THEIR_CHAT),
    _case("chat, no context", "no_context", _CHAT, _THEIR_CHAT),
    _case("chat, several contexts", "several_contexts", _CHAT, _THEIR_CHAT),
    _case("chat, loglikelihood, a system instruction", "likely", _CHAT | _SYSTEM, _THEIR_CHAT | _SYSTEM),
    _case("examples with other templates", "own_shots"),
    _case("a file that includes another", "included"),
    _case("gsm8k_cot_llama, chat", "gsm8k_cot_llama", _CHAT, _THEIR_CHAT),
    # text
    _case("spaces before punctuation are cleaned up", "writes", model=CLEANED),
    _case("until: characters of several bytes", "until_characters"),
    _case("until: characters of several bytes", "until_characters", model="tiny, byte fallback"),
    _case("until: letters and spaces", "until_letters_and_spaces", model="tiny, byte fallback"),
    _case("until: letters and spaces, v2 with n-gram drafts", "until_letters_and_spaces", model="tiny, byte fallback", spec={**_NGRAM, "schedule": "v2"}),
    _case("byte-fallback tokens", "writes", model="tiny, byte fallback"),
    _case("byte-fallback tokens, until within a token", "until_in_a_token", model="tiny, byte fallback"),
    # filters and metrics
    _case("filters", "filtered", quick=True),
    _case("repeats, take_first_k, majority_vote", "repeated"),
    _case("multi_choice_regex", "letters"),
    _case("exact_match with rules, bleu, chrf, ter", "compared"),
    # likelihoods
    _case("multiple choice", "chooses"),
    _case("multiple choice, 3 examples", "chooses_with_examples", quick=True),
    _case("multiple choice, choices of the row", "chooses_of_the_row"),
    _case("multiple choice, f1, mcc, brier_score", "more_metrics"),
    _case("acc_mutual_info", "mutual_information"),
    _case("loglikelihood", "likely"),
    _case("loglikelihood_rolling", "likely_texts"),
    _case("loglikelihood_rolling, several windows", "likely_texts", model=SHORT),
    _case("multiple choice, texts that are too long", "long_context", model=SHORT),
    _case("loglikelihood, no BOS", "likely", model="tiny without BOS"),
    _case("loglikelihood, byte-fallback tokens", "likely", model="tiny, byte fallback"),
    _case("no context", "no_context"),
    _case("no context, no BOS", "no_context", model="tiny without BOS"),
    _case("several contexts", "several_contexts"),
    _case("choices as text, context ends in a space", "choices_as_text"),
    _case("several targets", "several_targets"),
    _case("the target is one of choices", "target_of_choices"),
    # several tasks
    _case("tag of tasks", "tagged"),
    _case("group, weighed by size", "weighed"),
    _case("group, each task alike", "even"),
    _case("group in a group", "nested"),
    _case("group of tasks with other numbers of examples, 1 asked for", "weighed", {"num_fewshot": 1}, {"num_fewshot": 1}),
    _case("group of several types", "mixed"),
    Case("three tasks", ("writes", "gsm8k", "delimited"), {"limit": 2}, {"limit": 2}),
    Case("tasks of two types", ("writes", "chooses"), {"limit": 2}, {"limit": 2}),
    # questions
    Case("all questions", ("writes",), quick=True),
    Case("30% of the questions", ("writes",), {"limit": 0.3}, {"limit": 0.3}),
    Case("25% of the questions", ("chooses",), {"limit": 0.25}, {"limit": 0.25}),
    Case("questions 1, 4 and 7", ("writes",), {"samples": {"writes": [1, 4, 7]}}, {"samples": {"writes": [1, 4, 7]}}),
    Case(
        "questions of two tasks", ("writes", "described"), {"samples": {"writes": [2], "described": [0, 3]}},
        {"samples": {"writes": [2], "described": [0, 3]}},
    ),
    Case(
        "questions 7, 1 and 4, in this order", ("no_examples",), {"samples": {"no_examples": [7, 1, 4]}},
        {"samples": {"no_examples": [7, 1, 4]}}, differs=("filtered",),
        why="lm-eval 0.4.13 numbers the questions in the order of the list, but asks them in that of the data",
        option="--samples in ascending order",
    ),
    # other options
    _case("predict_only", "filtered", {"predict_only": True}, {"predict_only": True}),
    _case("predict_only, multiple choice", "chooses", {"predict_only": True}, {"predict_only": True}),
    _case("gen_kwargs", "writes", {"gen_kwargs": '{"until": ["e"], "max_gen_toks": 9}'}, {"gen_kwargs": {"until": ["e"], "max_gen_toks": 9}}),
    _case("examples asked for, of a task with 0", "no_examples", {"num_fewshot": 0}, {"num_fewshot": 3}),
    _case("bootstrap_iters 0", "likely", {"bootstrap_iters": 0}, {"bootstrap_iters": 0}),
    _case("write_out", "writes", {"write_out": True}, {"write_out": True}),
    _case("repetition_penalty in the task", "penalized"),
    _case("repetition_penalty in the task, v2 with n-gram drafts", "penalized", spec={**_NGRAM, "schedule": "v2"}),
    _case("sampled with temperature, top_p and top_k", "sampled_more", aspects=ASKED),
    # what we do not follow
    _case(
        "sampled with temperature", "sampled", aspects=ASKED, differs=("limits",), option="--top-k 50",
        why="HFLM samples with top_k 50, transformers' default, which the task does not set",
    ),
    _case("sampled with temperature, top_k 50", "sampled", {"top_k": 50}, aspects=ASKED),
    _case(
        "generation_config.json with repetition_penalty", "writes", model=PENALTY, differs=("limits", "answers", "filtered"),
        why="HFLM applies it, also to greedy answers", option="--gen-kwargs repetition_penalty=1.3",
    ),
    _case(
        "generation_config.json with repetition_penalty, which is asked for", "writes", model=PENALTY,
        ours={"gen_kwargs": "repetition_penalty=1.3"},
    ),
    _case("repeats of sampled answers", "repeated_samples", {"top_k": 50}, aspects=ASKED),
    _case(
        "generation_config.json with sampling values, sampled", "sampled", model=SAMPLES, aspects=ASKED, differs=("limits",),
        why="HFLM applies its top_k and top_p, which the task does not set", option="--top-k 20 --top-p 0.8",
    ),
    _case(
        "generation_config.json with sampling values, which are asked for", "sampled", {"top_k": 20, "top_p": 0.8},
        model=SAMPLES, aspects=ASKED,
    ),
    _case("generation_config.json with sampling values, greedy", "writes", model=SAMPLES),
    _case(
        "generation_config.json with max_new_tokens", "writes", model=BRIEF, differs=("answers", "filtered"),
        why="HFLM applies its max_new_tokens in place of the task's limit", option="--max-new-tokens 7",
    ),
    _case(
        "generation_config.json with max_new_tokens, which is asked for", "writes", {"max_new_tokens": 7}, model=BRIEF,
        aspects=tuple({*ASPECTS} - {"limits"}),
    ),
    _case(
        "prompts that are too long", "long_prompts", model=SHORT, differs=("refused",),
        why="HFLM drops the beginning of the prompt", option="--truncate-prompts",
    ),
    _case("prompts that are too long, truncated", "long_prompts", {"truncate_prompts": True}, model=SHORT),
    _case("prompts that are too long, truncated, chat", "long_prompts", {"truncate_prompts": True, **_CHAT}, _THEIR_CHAT, model=SHORT),
    _case(
        "perplexity, default bootstrap", "likely", theirs={"bootstrap_iters": 100_000}, differs=("scores",),
        why="lm-eval resamples 100,000 times, specbatch 1,000 times", option="--bootstrap-iters 100000",
    ),
    _case("perplexity, 100,000 resamples", "likely", {"bootstrap_iters": 100_000}, {"bootstrap_iters": 100_000}),
    _case(
        "reasoning that the limit cuts off", "writes", _CHAT, _THEIR_CHAT, model=REASONS, hflm={"think_end_token": "</think>"},
        differs=("limits", "answers", "filtered"), why="lm-eval scores it as the answer; here the answer is empty",
    ),
    _case(
        "reasoning that ends", "writes", _CHAT, _THEIR_CHAT, model=CONCLUDES, hflm={"think_end_token": "</think>"},
        aspects=("prompts", "filtered", "metrics", "scores", "counts"),
    ),
    # the bundled model
    _case("gsm8k, 5 examples", "gsm8k", {"max_new_tokens": 48}, {"gen_kwargs": {"max_gen_toks": 48}}, model=BUNDLED),
    _case("chat", "writes", _CHAT, _THEIR_CHAT, model=BUNDLED),
    _case("multiple choice", "chooses", model=BUNDLED),
]  # fmt: skip
