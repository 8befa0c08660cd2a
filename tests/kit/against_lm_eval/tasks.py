"""Task files of lm-eval for the cases, and the rows of their data."""

from __future__ import annotations

from typing import Any

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
FUNCTIONS = """
def odd(rows):
    return rows.filter(lambda row: int(row["answer"]) % 4 != 1)

def text(row):
    return "Pears: " + row["question"] + "\\nNumber:"

def score(row, results):
    return {"letters": sum(map(str.isalpha, results[0])), "vowels": sum(letter in "aeiou" for letter in results[0])}
"""
ROWS = {"train": TRAIN, "test": TEST}

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
                    "function": "multi_choice_regex",
                    "group_select": 0,
                    "ignore_case": True,
                    "ignore_punctuation": True,
                    "regex_pattern": r"(\([A-Z]\))",
                },
                _FIRST,
            ],
        }
    ],
}

TASKS: dict[str, dict[str, Any]] = {
    "writes": _WRITES,
    "no_limit": _WRITES | {"generation_kwargs": {"until": ["Q:"], **_GREEDY}},
    "no_arguments": {name: value for name, value in _WRITES.items() if name != "generation_kwargs"},
    "until_text": _WRITES | _generation(until="e"),
    "until_none": _WRITES | _generation(until=[]),
    "until_end": _WRITES | _generation(until=["<|im_end|>", "</s>"]),
    "until_in_a_token": _WRITES | _generation(until=["a", "ow", "ll"]),
    "until_several_tokens": _WRITES | _generation(until=["s en", "te", "e \n", "enday"]),
    "other_name_of_the_limit": _WRITES
    | {"generation_kwargs": {"max_new_tokens": 24, "until": ["Q:"], "do_sample": False}},
    "temperature_without_sampling": _WRITES | {"generation_kwargs": {"until": ["Q:"], "max_gen_toks": 24}},
    "described": _WRITES | {"description": "Answer with a number.\n\n"},
    "described_choices": _CHOOSES | {"description": "Name a color.\n\n"},
    "begins_with_bos": _WRITES | {"doc_to_text": "<s>Q: {{question}}\nA:", "num_fewshot": 0},
    "described_by_row": _WRITES | {"description": "This is about {{question[:3]}}.\n"},
    "begun_by_row": _WRITES | {"gen_prefix": "{{question[:9]}}"},
    "begun_choices": _CHOOSES | {"gen_prefix": "It is the color", "num_fewshot": 2},
    "no_context": _DATA
    | {
        "output_type": "loglikelihood",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "several_contexts": _CHOOSES
    | {
        "doc_to_text": "color",
        "doc_to_choice": "{{[question ~ ' Red', question ~ ' Blue', 'Green', 'Grey']}}",
        "doc_to_target": "is the color of the box.",
    },
    "choices_as_text": _CHOOSES | {"doc_to_choice": "{{choices}}", "doc_to_text": "{{question}} Color: "},
    "several_targets": _CHOOSES
    | {"doc_to_target": "{{[color, (color + 1) % 4]}}", "metric_list": _CHOOSES["metric_list"][:1]},
    "target_of_choices": _WRITES | {"doc_to_choice": list(_COLORS), "doc_to_target": "color"},
    "until_characters": _WRITES | _generation(until=["\ufffd", "é", "東"]),
    "until_letters_and_spaces": _WRITES | _generation(until=[" s", "e ", "in", "o"]),
    "own_shots": _WRITES
    | {
        "fewshot_config": {
            "doc_to_text": "Example: {{question}}",
            "doc_to_target": "({{answer}})",
            "sampler": "first_n",
        }
    },
    "included": {"include": "writes.yaml", "num_fewshot": 1, "doc_to_text": "Problem: {{question}}\nSolution:"},
    "repeated_samples": _WRITES
    | {"repeats": 2, "generation_kwargs": {"until": ["Q:"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}},
    "spaced": _CHOOSES | {"doc_to_text": "{{question}}  \n ", "num_fewshot": 1},
    "undelimited": _CHOOSES | {"target_delimiter": "", "fewshot_delimiter": " ## ", "num_fewshot": 2},
    "choices_in_bytes": _CHOOSES | {"doc_to_choice": ["é", "東京 x", "☃", "grün "]},
    "likely_with_examples": {name: value for name, value in _CHOOSES.items() if name != "doc_to_choice"}
    | {
        "output_type": "loglikelihood",
        "doc_to_target": " {{answer}} apples",
        "description": "Read: ",
        "gen_prefix": "It is",
        "num_fewshot": 1,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "names_of_tokens": _WRITES | {"doc_to_text": "<|im_end|>{{question}}</s> <s> A:"},
    "until_patterns": _WRITES | _generation(until=["[", ".*", "(a|b)", "e "]),
    "by_functions": _WRITES
    | {
        "process_docs": "!function functions.odd",
        "doc_to_text": "!function functions.text",
        "process_results": "!function functions.score",
        "metric_list": [
            {"metric": "letters", "aggregation": "mean", "higher_is_better": True},
            {"metric": "vowels", "aggregation": "mean", "higher_is_better": True},
        ],
    },
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
    "sampled": _WRITES
    | {"generation_kwargs": {"until": ["Q:"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.7}},
    "sampled_more": _WRITES
    | {
        "generation_kwargs": {
            "until": ["Q:"],
            "max_gen_toks": 12,
            "do_sample": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
        }
    },
}
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
