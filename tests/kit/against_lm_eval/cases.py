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
    SAYS_BOS,
    SAYS_NO_BOS,
    SHORT,
    TRIMS,
)

Options = Mapping[str, Any]
ASPECTS = ("prompts", "limits", "answers", "filtered", "metrics", "scores", "counts")
PARTS = ("prompts", "limits", "answers", "filtered", "metrics")  # of single questions
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
    offset   of specbatch: as many of lm-eval's first questions are not compared
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
    offset: int = 0
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.model}"


_THREE = {"ours": {"limit": 3}, "theirs": {"limit": 3}}
_SAMPLING = "temperature=0.7,do_sample=True,top_k=5,top_p=0.9,min_p=0.02"
_CODE = {"confirm_run_unsafe_code": True}
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
    _case(
        "gsm8k, 3 examples, another seed",
        "gsm8k",
        {"num_fewshot": 3, "seed": 7},
        {"num_fewshot": 3, "fewshot_random_seed": 7},
    ),
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
    _case("add_bos_token and tokenizer.json disagree", "writes", model=SAYS_BOS),
    _case("add_bos_token and tokenizer.json disagree", "writes", model=SAYS_NO_BOS),
    _case("add_bos_token and tokenizer.json disagree, chat", "writes", _CHAT, _THEIR_CHAT, model=SAYS_NO_BOS),
    _case("add_bos_token and tokenizer.json disagree, loglikelihood", "likely", model=SAYS_NO_BOS),
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
    _case(
        "until: letters and spaces, v2 with n-gram drafts",
        "until_letters_and_spaces",
        model="tiny, byte fallback",
        spec={**_NGRAM, "schedule": "v2"},
    ),
    _case("byte-fallback tokens", "writes", model="tiny, byte fallback"),
    _case("byte-fallback tokens, until within a token", "until_in_a_token", model="tiny, byte fallback"),
    _case("names of special tokens in the question", "names_of_tokens"),
    _case("names of special tokens in the question", "names_of_tokens", model="tiny, byte fallback"),
    _case("chat, names of special tokens in the question", "names_of_tokens", _CHAT, _THEIR_CHAT),
    _case("until: texts that look like patterns", "until_patterns"),
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
    _case("metrics by a function", "by_functions", _CODE),
    _case("metrics by a function, v2 with n-gram drafts", "by_functions", _CODE, spec={**_NGRAM, "schedule": "v2"}),
    _case("context ends in spaces", "spaced"),
    _case("context ends in spaces", "spaced", model="tiny, byte fallback"),
    _case("chat, context ends in spaces", "spaced", _CHAT, _THEIR_CHAT),
    _case("no delimiter before the choices", "undelimited"),
    _case("chat, no delimiter before the choices", "undelimited", _CHAT, _THEIR_CHAT),
    _case("choices of characters of several bytes", "choices_in_bytes"),
    _case("choices of characters of several bytes", "choices_in_bytes", model="tiny, byte fallback"),
    _case("loglikelihood, an example and a description", "likely_with_examples"),
    _case("chat, loglikelihood, an example and a description", "likely_with_examples", _CHAT, _THEIR_CHAT),
    # several tasks
    _case("tag of tasks", "tagged"),
    _case("group, weighed by size", "weighed"),
    _case("group, each task alike", "even"),
    _case("group in a group", "nested"),
    _case(
        "group of tasks with other numbers of examples, 1 asked for", "weighed", {"num_fewshot": 1}, {"num_fewshot": 1}
    ),
    _case("group of several types", "mixed"),
    Case("three tasks", ("writes", "gsm8k", "delimited"), {"limit": 2}, {"limit": 2}),
    Case("tasks of two types", ("writes", "chooses"), {"limit": 2}, {"limit": 2}),
    # questions
    Case("all questions", ("writes",)),
    _case("questions 3 to 6", "writes", {"offset": 3, "limit": 4}, {"limit": 7}, offset=3, aspects=PARTS),
    _case(
        "gsm8k, questions 40 and 41",
        "gsm8k",
        {"offset": 40, "limit": 2},
        {"limit": 42},
        offset=40,
        aspects=("prompts",),
    ),
    Case("30% of the questions", ("writes",), {"limit": 0.3}, {"limit": 0.3}),
    Case("25% of the questions", ("chooses",), {"limit": 0.25}, {"limit": 0.25}),
    Case("questions 1, 4 and 7", ("writes",), {"samples": {"writes": [1, 4, 7]}}, {"samples": {"writes": [1, 4, 7]}}),
    Case(
        "questions of two tasks",
        ("writes", "described"),
        {"samples": {"writes": [2], "described": [0, 3]}},
        {"samples": {"writes": [2], "described": [0, 3]}},
    ),
    Case(
        "questions of the tasks of a group",
        ("even",),
        {"samples": {"chooses": [2, 5], "chooses_of_the_row": [1]}},
        {"samples": {"chooses": [2, 5], "chooses_of_the_row": [1]}},
    ),
    Case("25% of the questions of a group", ("even",), {"limit": 0.25}, {"limit": 0.25}),
    Case(
        "questions 7, 1 and 4, in this order",
        ("no_examples",),
        {"samples": {"no_examples": [7, 1, 4]}},
        {"samples": {"no_examples": [7, 1, 4]}},
        differs=("filtered",),
        why="lm-eval 0.4.13 numbers the questions in the order of the list, but asks them in that of the data",
        option="--samples in ascending order",
    ),
    # other options
    _case("predict_only", "filtered", {"predict_only": True}, {"predict_only": True}),
    _case("predict_only, a group of several types", "mixed", {"predict_only": True}, {"predict_only": True}),
    _case("predict_only, multiple choice", "chooses", {"predict_only": True}, {"predict_only": True}),
    _case(
        "gen_kwargs",
        "writes",
        {"gen_kwargs": '{"until": ["e"], "max_gen_toks": 9}'},
        {"gen_kwargs": {"until": ["e"], "max_gen_toks": 9}},
    ),
    _case("bootstrap_iters 0", "likely", {"bootstrap_iters": 0}, {"bootstrap_iters": 0}),
    _case("write_out", "writes", {"write_out": True}, {"write_out": True}),
    _case("repetition_penalty in the task", "penalized"),
    _case("repetition_penalty in the task, v2 with n-gram drafts", "penalized", spec={**_NGRAM, "schedule": "v2"}),
    _case("sampled with temperature, top_p and top_k", "sampled_more", aspects=ASKED),
    _case(
        "gen_kwargs of sampled answers",
        "writes",
        {"gen_kwargs": _SAMPLING},
        {"gen_kwargs": _SAMPLING},
        aspects=ASKED,
    ),
    _case(
        "gen_kwargs: max_new_tokens", "no_limit", {"gen_kwargs": "max_new_tokens=9"}, {"gen_kwargs": "max_new_tokens=9"}
    ),
    # what we do not follow
    _case(
        "sampled with temperature",
        "sampled",
        aspects=ASKED,
        differs=("limits",),
        option="--top-k 50",
        why="HFLM samples with top_k 50, transformers' default, which the task does not set",
    ),
    _case("sampled with temperature, top_k 50", "sampled", {"top_k": 50}, aspects=ASKED),
    _case(
        "generation_config.json with repetition_penalty",
        "writes",
        model=PENALTY,
        differs=("limits", "answers", "filtered"),
        why="HFLM applies it, also to greedy answers",
        option="--gen-kwargs repetition_penalty=1.3",
    ),
    _case(
        "generation_config.json with repetition_penalty, which is asked for",
        "writes",
        model=PENALTY,
        ours={"gen_kwargs": "repetition_penalty=1.3"},
    ),
    _case("repeats of sampled answers", "repeated_samples", {"top_k": 50}, aspects=ASKED),
    _case(
        "generation_config.json with sampling values, sampled",
        "sampled",
        model=SAMPLES,
        aspects=ASKED,
        differs=("limits",),
        why="HFLM applies its top_k and top_p, which the task does not set",
        option="--top-k 20 --top-p 0.8",
    ),
    _case(
        "generation_config.json with sampling values, which are asked for",
        "sampled",
        {"top_k": 20, "top_p": 0.8},
        model=SAMPLES,
        aspects=ASKED,
    ),
    _case("generation_config.json with sampling values, greedy", "writes", model=SAMPLES),
    _case(
        "generation_config.json with max_new_tokens",
        "writes",
        model=BRIEF,
        differs=("answers", "filtered"),
        why="HFLM applies its max_new_tokens in place of the task's limit",
        option="--max-new-tokens 7",
    ),
    _case(
        "generation_config.json with max_new_tokens, which is asked for",
        "writes",
        {"max_new_tokens": 7},
        model=BRIEF,
        aspects=tuple({*ASPECTS} - {"limits"}),
    ),
    _case(
        "3 examples asked for, of a task with 0",
        "no_examples",
        {"num_fewshot": 3},
        {"num_fewshot": 3},
        differs=("refused",),
        why="lm-eval ignores the number",
        option="no --num-fewshot",
    ),
    _case("3 examples asked for of lm-eval only, of a task with 0", "no_examples", {}, {"num_fewshot": 3}),
    _case(
        "prompts that are too long",
        "long_prompts",
        model=SHORT,
        differs=("refused",),
        why="HFLM drops the beginning of the prompt",
        option="--truncate-prompts",
    ),
    _case("prompts that are too long, truncated", "long_prompts", {"truncate_prompts": True}, model=SHORT),
    _case(
        "prompts that are too long, truncated, chat",
        "long_prompts",
        {"truncate_prompts": True, **_CHAT},
        _THEIR_CHAT,
        model=SHORT,
    ),
    _case(
        "perplexity, default bootstrap",
        "likely",
        theirs={"bootstrap_iters": 100_000},
        differs=("scores",),
        why="lm-eval resamples 100,000 times, specbatch 1,000 times",
        option="--bootstrap-iters 100000",
    ),
    _case("perplexity, 100,000 resamples", "likely", {"bootstrap_iters": 100_000}, {"bootstrap_iters": 100_000}),
    _case(
        "reasoning that the limit cuts off",
        "writes",
        _CHAT,
        _THEIR_CHAT,
        model=REASONS,
        hflm={"think_end_token": "</think>"},
        differs=("limits", "answers", "filtered"),
        why="lm-eval scores it as the answer; here the answer is empty",
    ),
    _case(
        "reasoning that ends",
        "writes",
        _CHAT,
        _THEIR_CHAT,
        model=CONCLUDES,
        hflm={"think_end_token": "</think>"},
        aspects=("prompts", "filtered", "metrics", "scores", "counts"),
    ),
    # the bundled model
    _case("gsm8k, 5 examples", "gsm8k", {"max_new_tokens": 48}, {"gen_kwargs": {"max_gen_toks": 48}}, model=BUNDLED),
    _case("chat", "writes", _CHAT, _THEIR_CHAT, model=BUNDLED),
    _case("multiple choice", "chooses", model=BUNDLED),
]
