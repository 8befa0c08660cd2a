"""lm-eval model adapter: renders chats, generates answers and scores log-likelihoods with the engine.

lm = SpecBatchLM(engine, "gsm8k")
lm_eval.simple_evaluate(model=lm, tasks=["gsm8k"])
lm.answers                                     # the Completion of every request, next to lm-eval's scores

This adapter makes the same choices as lm-eval's model for transformers (`HFLM` of 0.4.13).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams, sampling_of, sampling_text
from specbatch.errors import counted, refuse
from specbatch.evals.finished import Answer, Row, Scored, hash_of
from specbatch.evals.generation import LIMITS, Generation, generation_of
from specbatch.evals.generation_config import generation_config, unapplied
from specbatch.evals.scoring_lm import ScoringLM
from specbatch.jobs.partial_output import row_seed
from specbatch.text.chat_template import TemplateRefusal
from specbatch.text.thinking import Reasoning

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine


class SpecBatchLM(ScoringLM):
    """Passes all requests of lm-eval to `engine.generate` or `engine.score` at once, so that the engine batches them.

    task            name of the task, for error messages
    max_new_tokens  limit of every answer; None: the task's limit, or `options.MAX_NEW_TOKENS`
    chat_template   whether prompts were rendered by `apply_chat_template`
    thinking        `enable_thinking` of the chat template; None leaves the template's default
    think_end_token  text that ends reasoning, if the model's is not one of `specbatch.text.thinking.MARKS`
    add_bos_token   whether texts that do not begin with the bos token get it; None: as the tokenizer encodes a text
    truncate_prompts  drop the beginning of prompts that are too long, instead of refusing them
    sampling        parameters that replace those of the task, by name
    concurrency     as for `Engine.generate`
    finished        rows of an earlier run that was interrupted, by index; these requests are not run again
    on_answer       called with each new Answer or Scored, and the total number of them
    first_ids       by task of a group: the number of its first question (`EvalTask.first_ids`)

    After the run `answers` holds every Answer, `scored` every Scored, and `prompts` the input of each request (a
    prompt; a context and its continuation; a text), in the order of the requests. `budget` is the largest limit of an
    answer, `sampling` how the answers were sampled (None: greedy), `cut` the number of texts that lost their beginning,
    `earlier` the number of results that came from `finished`, `notes` what users should know about the prompts and the
    generation arguments.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        task: str,
        *,
        max_new_tokens: int | None = None,
        chat_template: bool = False,
        thinking: bool | None = None,
        think_end_token: str | None = None,
        add_bos_token: bool | None = None,
        truncate_prompts: bool = False,
        sampling: Mapping[str, float] | None = None,
        concurrency: int | None = None,
        finished: Mapping[int, Row] | None = None,
        on_answer: Callable[[Answer | Scored, int], None] | None = None,
        first_ids: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            engine,
            task,
            chat_template=chat_template,
            add_bos_token=add_bos_token,
            finished=finished,
            on_answer=on_answer,
            first_ids=first_ids,
        )
        self._max_new_tokens = max_new_tokens
        self._chat_template = chat_template
        self._switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        self._think_end_token = think_end_token
        self._truncates = truncate_prompts
        self._chosen = sampling or {}
        self._concurrency = concurrency
        self._showing: dict[tuple[str, ...], bool] = {}  # by stop strings: `_shows`
        self._generations: dict[str, Generation] = {}  # by arguments
        self._notes: dict[str, None] = {}
        self._without_system = self._truncated = 0  # prompts
        self.budget = 0
        self.sampling: dict[str, float] | None = None

    @property
    def notes(self) -> list[str]:
        counts = []
        if self._without_system:
            prompts = counted(self._without_system, "prompt")
            counts.append(f"the chat template refuses system messages: they were left out of {prompts}, as in lm-eval")
        if self._truncated:
            prompts, most = counted(self._truncated, "prompt"), self._longest
            counts.append(f"{prompts} lost the beginning (truncate_prompts), because of max_model_len={most}")
        return [*self._encoding.notes, *self._notes, *counts]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation. Without the generation prompt its last message is the start of the answer. System
        messages that the template refuses are left out."""

        def rendered(messages: list[dict[str, str]]) -> str:
            apply = self._engine.tokenizer.apply_chat_template
            return apply(messages, continue_final_message=not add_generation_prompt, **self._switch)

        try:
            return rendered(chat_history)
        except TemplateRefusal:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) in (0, len(chat_history)):
                raise
            text = rendered(others)
        self._without_system += 1
        return text

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The texts of the answers in the order of `requests`, without reasoning, each ending before its first stop
        string. As in lm-eval 0.4.13 (`postprocess_generated_text`) the reasoning is removed first, so that a stop
        string in it has no effect."""
        first = len(self.answers) + len(self.scored)  # of earlier calls
        asked = [self._generation(item.args[1]) for item in requests]
        params = [
            self._params(item.args[0], generation, first + place)
            for place, (item, generation) in enumerate(zip(requests, asked, strict=True))
        ]
        budgets = [one.max_new_tokens for one in params]
        prompts = self._prompts_of(requests, budgets)
        hashes = [hash_of(item.args) for item in requests]
        rows = [self._row(first + place, digest) for place, digest in enumerate(hashes)]
        tokens = [one if _is_ids(one) else [] for one in prompts]
        done = {place: Answer.from_row(row, tokens[place]) for place, row in enumerate(rows) if row is not None}
        missing = [place for place in range(len(requests)) if place not in done]

        def answer_of_place(place: int, completion: Completion) -> Answer:
            return Answer(self._question(requests[place]), hashes[place], replace(completion, index=first + place))

        def finished(completion: Completion) -> None:
            if self._on_answer is not None:
                self._on_answer(answer_of_place(missing[completion.index], completion), len(requests))

        completions = self._generate(
            [prompts[place] for place in missing], [params[place] for place in missing], finished
        )
        done |= {place: answer_of_place(place, one) for place, one in zip(missing, completions, strict=True)}
        answers = [done[place] for place in range(len(requests))]
        texts = self._texts([answer.completion for answer in answers], requests, asked)
        self.answers += answers
        for request, text in zip(requests, texts, strict=True):
            self.prompts.append(request.args[0])
            self.cache_hook.add_partial("generate_until", request.args, text)
        self.budget = max([self.budget, *budgets])
        self._note_arguments(asked, params)
        return texts

    # -- what differs by engine -----------------------------------------------------------------------------------

    def _prompts_of(self, requests: list[Instance], budgets: list[int]) -> list[Any]:
        """What the engine gets as the prompts of requests, whose answers have at most `budgets` tokens."""
        return self._fitted_prompts(requests, [self._encoding.prompt(item.args[0]) for item in requests], budgets)

    def _generate(
        self, prompts: list[Any], params: list[SamplingParams], on_completion: Callable[[Completion], None]
    ) -> list[Completion]:
        return self._engine.generate(prompts, params, concurrency=self._concurrency, on_completion=on_completion)

    def _texts(self, completions: list[Completion], requests: list[Instance], asked: list[Generation]) -> list[str]:
        """What is scored of the answers."""
        each = zip(completions, requests, asked, strict=True)
        return [self._text(done, request.args[0], generation.stops) for done, request, generation in each]

    def _stop_of_model(self) -> str:
        """A text that ends every answer: as in lm-eval, that of the eos token."""
        return self._encoding.end

    def _model_values(self) -> dict[str, Any]:
        """Of the model's generation_config.json."""
        return generation_config(self._engine.config)

    # -- of this engine -------------------------------------------------------------------------------------------

    @cached_property
    def _reasoning(self) -> Reasoning:
        return Reasoning(self._engine.tokenizer, self._think_end_token)

    def _shows(self, stops: tuple[str, ...]) -> bool:
        """Whether a stop string can lie partly in the name of a token that a decoded text leaves out. As in lm-eval
        0.4.13 stop strings are looked for in a text with these names."""
        if stops not in self._showing:
            names = self._engine.tokenizer.hidden
            self._showing[stops] = any(name != stop and _meet(name, stop) for stop in stops for name in names)
        return self._showing[stops]

    def _text(self, completion: Completion, prompt: str, stops: Sequence[str]) -> str:
        """What is scored of an answer. As in lm-eval 0.4.13, its stop strings cut the text of all tokens one after
        another: where two of them overlap in the text of one token, the first of the task's counts."""
        tokenizer, tokens = self._engine.tokenizer, completion.token_ids
        whole = tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_ids else tokens)
        text = self._reasoning.answer_of(whole, tokens, opened=self._reasoning.is_opened_by(prompt))
        return str(postprocess_generated_text(text, list(stops), None))

    def _generation(self, wanted: dict[str, Any]) -> Generation:
        """What a task's generation arguments ask for."""
        key = json.dumps(wanted, default=repr)
        if key not in self._generations:
            found = generation_of(wanted, ("task", self._task), self._chosen, self._max_new_tokens)
            stops = dict.fromkeys([*found.stops, *filter(None, [self._stop_of_model()])])
            self._generations[key] = found._replace(stops=tuple(stops))
        return self._generations[key]

    def _note_arguments(self, asked: list[Generation], params: list[SamplingParams]) -> None:
        """Keep how answers were sampled, and note arguments that have no effect, or that lm-eval would have added."""
        values = self._model_values()
        for place, (one, own) in enumerate(zip(asked, params, strict=True)):
            if place and one is asked[place - 1]:
                continue
            sampling = sampling_of(own)
            if place == 0:
                self.sampling = sampling
            elif sampling != self.sampling:
                self._notes[f"some answers were made with other arguments: {sampling_text(sampling)}"] = None
            given = {*one.given, *self._chosen} - {*LIMITS}
            if values.get("max_new_tokens") == own.max_new_tokens:
                given.add("max_new_tokens")
            lines = (*one.notes, *unapplied(values, given, sampled=bool(own.temperature)))
            self._notes |= dict.fromkeys(lines)

    def _params(self, prompt: str, asked: Generation, index: int) -> SamplingParams:
        """The parameters of a request. Its seed depends on its index and not on which requests an earlier run had
        finished."""
        reasoning, hidden = self._reasoning, self._engine.tokenizer.hidden
        return SamplingParams(
            **asked.params,
            stop=() if self._reasons(prompt) else asked.stops,
            stop_token_ids=tuple(hidden[stop] for stop in asked.stops if stop in hidden),
            reasoning=reasoning.opens,
            skip_special_tokens=not (reasoning.hidden or self._shows(asked.stops)),
            seed=row_seed(self._engine.config.seed, index),
        )

    def _reasons(self, prompt: str) -> bool:
        """Whether the answer to a prompt may begin inside reasoning."""
        reasoning = self._reasoning
        if self._think_end_token is not None or reasoning.is_opened_by(prompt):
            return True
        return self._chat_template and reasoning.may_open(prompt)

    def _fitted_prompts(
        self, requests: list[Instance], prompts: list[list[int]], budgets: list[int]
    ) -> list[list[int]]:
        """The prompts as they fit beside their answers of at most `budgets` tokens: with `truncate_prompts` their last
        tokens, as in `HFLM`. Refused: others that are too long."""
        if self._truncates and max(budgets, default=0) < self._longest:
            fitted = [prompt[-(self._longest - budget) :] for prompt, budget in zip(prompts, budgets, strict=True)]
            self._truncated += sum(len(one) < len(prompt) for one, prompt in zip(fitted, prompts, strict=True))
            return fitted
        needed, place = max(((len(prompt) + budgets[at], at) for at, prompt in enumerate(prompts)), default=(0, 0))
        if needed > self._longest:
            works = "fewer examples (num_fewshot) or a smaller max_new_tokens"
            works += "" if self._truncates else "; truncate_prompts drops the beginning, as lm-eval does"
            raise refuse(
                "max_model_len",
                self._longest,
                f"question {requests[place].doc_id} of {self._task}, the longest, has {len(prompts[place])} prompt "
                f"tokens and up to {budgets[place]} answer tokens; use at least {needed}, {works}",
            )
        return prompts


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and not (prompt and isinstance(prompt[0], dict))


def _meet(one: str, other: str) -> bool:
    """Whether two texts can share characters in a text that has both."""
    if one in other or other in one:
        return True
    ends = range(1, min(len(one), len(other)))
    return any(one.endswith(other[:end]) or other.endswith(one[:end]) for end in ends)
