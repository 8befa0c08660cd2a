"""lm-eval model adapter for servers of other engines over HTTP (`HttpEngine`).

What is asked and scored is as in `SpecBatchLM`. Prompts go out as `Server.send` says:

* "chat": the messages, which the server renders with its chat template
* "text": the text, which the server tokenizes; with a chat template it is rendered here
* "ids": token ids, as this engine would get them

Only ids, texts that are rendered here, and log-likelihoods need the model's tokenizer. Answers have text and no token
ids. Reasoning is what the server splits off (`reasoning_content`), or else ends at its mark in the text.

A request that fails is asked again, in up to `ROUNDS` rounds; one that has an answer never is. If some have none in the
end there is no score: the answers are kept, and the same evaluation continues.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import MOST, FailedError, SpecbatchError, counted, refuse
from specbatch.evals.generation import Generation
from specbatch.evals.lm import SpecBatchLM
from specbatch.jobs.partial_output import row_seed
from specbatch.servers.client import Failed
from specbatch.servers.engine import HttpEngine
from specbatch.servers.served_model import LLAMACPP, SGLANG, VLLM
from specbatch.servers.server import CONCURRENCY
from specbatch.text.thinking import CLOSE, OPEN, Reasoning

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine
    from specbatch.engine.scoring import Likelihood, OnScore, Pair
    from specbatch.evals.options import EvalOptions
    from specbatch.evals.task import EvalTask

ROUNDS = 3
PAUSE_S = 2.0  # between rounds
MOST_IN_A_ROW = 16  # requests that may fail one after the other; with more of them at a time, as many
OPENAI_STOPS = 4  # stop strings that OpenAI's API takes
_REFUSED = ("HTTP 401", "HTTP 403")


class ServerLM(SpecBatchLM):
    """As `SpecBatchLM`, which see for the options. Raises FailedError where requests stay without an answer."""

    def __init__(self, engine: HttpEngine, task: str, *, concurrency: int | None = None, **options: Any) -> None:
        super().__init__(cast("InferenceEngine", engine), task, concurrency=concurrency or CONCURRENCY, **options)
        self._server = engine
        self._is_chat = engine.config.send == "chat"
        self._sends_ids = sends_ids(engine.config.send, chat_template=self._chat_template)
        self._opens = False  # the server's template opens the reasoning of answers
        self._known = engine.kind in (VLLM, SGLANG, LLAMACPP)

    @property
    def tokenizer_name(self) -> str:
        return super().tokenizer_name if self._sends_ids else self._server.model

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as JSON, if the server renders it."""
        if not self._is_chat:
            return super().apply_chat_template(chat_history, add_generation_prompt)
        if not add_generation_prompt and not self._known:
            works = f"task {self._task} begins the answers, which this server may not continue; use send='text'"
            raise refuse("send", "chat", works)
        return json.dumps(chat_history, ensure_ascii=False)

    # -- prompts and parameters -----------------------------------------------------------------------------------

    def _prompts_of(self, requests: list[Instance], budgets: list[int]) -> list[Any]:
        if self._sends_ids:
            return super()._prompts_of(requests, budgets)
        texts = [request.args[0] for request in requests]
        return [json.loads(text) for text in texts] if self._is_chat else texts

    def _params(self, prompt: str, asked: Generation, index: int) -> SamplingParams:
        reasons = self._reasons(prompt)
        stops = () if reasons else asked.stops if self._known else asked.stops[:OPENAI_STOPS]
        hidden: Mapping[str, int] = self._engine.tokenizer.hidden if self._sends_ids else {}
        ends = tuple(hidden[stop] for stop in asked.stops if stop in hidden)
        if self._server.kind not in (VLLM, SGLANG):
            ends = ()
        if len(stops) < len(asked.stops):
            why = "answers may reason; --no-thinking sends them" if reasons else "servers may take no more"
            count = f"{len(stops)} of {counted(len(asked.stops), 'stop string')}"
            self._notes[f"{count} were sent, because {why}; answers are cut at all of them afterwards"] = None
        return SamplingParams(
            **asked.params,
            stop=stops,
            stop_token_ids=ends,
            skip_special_tokens=not self._reasoning.hidden,
            seed=row_seed(self._server.config.seed or 0, index),
        )

    def _reasons(self, prompt: str) -> bool:
        if self._is_chat and self._think_end_token is None:
            return self._switch.get("enable_thinking") is not False
        return super()._reasons(prompt)

    @cached_property
    def _reasoning(self) -> Reasoning:
        return Reasoning(self._engine.tokenizer if self._sends_ids else None, self._think_end_token)

    def _stop_of_model(self) -> str:
        return super()._stop_of_model() if self._sends_ids else ""

    def _model_values(self) -> dict[str, Any]:
        return {}

    @property
    def _longest(self) -> int:
        return int(self._engine.caps.get("max_model_len", MOST))

    @property
    def _longest_scored(self) -> int:
        return self._longest - 2  # the server gets the last token, too, and generates one

    # -- answers --------------------------------------------------------------------------------------------------

    def _texts(self, completions: list[Completion], requests: list[Instance], asked: list[Generation]) -> list[str]:
        texts = [one.text for one in completions if one.reasoning is None]
        self._opens = self._is_chat and any(CLOSE in text and OPEN not in text for text in texts)
        return super()._texts(completions, requests, asked)

    def _text(self, completion: Completion, prompt: str, stops: Any) -> str:
        text = completion.text if completion.reasoning is None else completion.text.lstrip()
        if completion.reasoning is None:
            opened = self._opens or (not self._is_chat and self._reasoning.is_opened_by(prompt))
            text = self._reasoning.answer_of(text, None, opened=opened)
        text = str(postprocess_generated_text(text, list(stops), None))
        for name in self._engine.tokenizer.hidden if self._reasoning.hidden else ():
            text = text.replace(name, "")
        return text

    def _generate(
        self, prompts: list[Any], params: list[SamplingParams], on_completion: Callable[[Completion], None]
    ) -> list[Completion]:
        def ask(places: list[int], took: Callable[[int, Completion | str], None]) -> None:
            def answered(completion: Completion) -> None:
                place = places[completion.index]
                took(place, replace(completion, index=place) if completion.error is None else completion.error)

            asked = [prompts[place] for place in places], [params[place] for place in places]
            self._server.generate(*asked, concurrency=self._most, on_completion=answered)

        return self._in_rounds(len(prompts), ask, lambda place, completion: on_completion(completion))

    def _likelihoods(self, pairs: Sequence[Pair], on_score: OnScore) -> list[Likelihood]:
        def ask(places: list[int], took: Callable[[int, Likelihood | str], None]) -> None:
            asked = [pairs[place] for place in places]
            self._server.score(asked, concurrency=self._most, on_score=lambda index, one: took(places[index], one))

        return self._in_rounds(len(pairs), ask, on_score)

    @property
    def _most(self) -> int:
        assert self._concurrency is not None
        return self._concurrency

    def _in_rounds(
        self,
        count: int,
        ask: Callable[[list[int], Callable[[int, Any], None]], None],
        keep: Callable[[int, Any], None],
    ) -> list[Any]:
        """The results of `count` requests. ask: sends those at some places, and gives each result, or the reason of its
        failure, to a function; keep: gets each result once."""
        done, failed = dict[int, Any](), dict[int, str]()
        in_a_row = 0

        def took(place: int, found: Any) -> None:
            nonlocal in_a_row
            if isinstance(found, str):
                failed[place] = found
                in_a_row += 1
                if found.startswith(_REFUSED):
                    key = self._server.config.api_key_env
                    works = f"the server at {self._server.config.base_url} refuses it ({found})"
                    raise refuse("api_key_env", key, f"{works}; name the environment variable with its key")
                if in_a_row >= max(MOST_IN_A_ROW, self._most):
                    raise self._unanswered(failed, count)
                return
            in_a_row = 0
            failed.pop(place, None)
            done[place] = found
            keep(place, found)

        for number in range(ROUNDS):
            before = len(done)
            if number:
                time.sleep(PAUSE_S)
            ask(sorted(failed) if number else list(range(count)), took)
            if not failed:
                return [done[place] for place in range(count)]
            if len(done) == before:  # no use in asking again
                break
        raise self._unanswered(failed, count)

    def _unanswered(self, failed: Mapping[int, str], count: int) -> SpecbatchError:
        kinds = Counter(failed.values()).most_common()
        reasons = "; ".join(f"{reason} ({number})" for reason, number in kinds[:3])
        rest = f"; {counted(len(kinds) - 3, 'other reason')}" if len(kinds) > 3 else ""
        what = f"{len(failed)} of {counted(count, 'request')} without an answer: {reasons}{rest}"
        return FailedError(f"task {self._task}: {what}; there is no score without them")


def sends_ids(send: str, *, chat_template: bool) -> bool:
    """Whether prompts are made with the model's tokenizer."""
    return send == "ids" or (send == "text" and chat_template)


def needs_tokenizer(send: str, options: EvalOptions, *, scores_texts: bool) -> bool:
    """Whether the model's tokenizer is needed."""
    return scores_texts or sends_ids(send, chat_template=options.chat_template)


def check_server(engine: HttpEngine, options: EvalOptions, task: EvalTask) -> None:
    """Refuse what the server cannot do for a task."""
    send = engine.config.send
    if send == "chat" and not options.chat_template:
        raise refuse("send", "chat", "prompts are messages with the chat template only; add chat_template=True")
    if task.generates and not sends_ids(send, chat_template=options.chat_template):
        given = {"add_bos_token": options.add_bos_token, "truncate_prompts": options.truncate_prompts or None}
        for name, value in given.items():
            if value is not None:
                raise refuse(name, value, "the server tokenizes the prompts; use send='ids', or leave it out")
    if not task.scores_texts:
        return
    if send == "chat":
        works = f"task {task.name} ({task.kind}) scores given texts, which no server takes as messages; use send='ids'"
        raise refuse("send", send, works)
    tokens = engine.tokenizer.encode("1, 2, 3", add_special_tokens=False)
    try:
        engine.check_scores((tokens[:1], tokens[1:]))
    except Failed as error:
        works = f"scores given texts ({task.kind}), for which a server must give log-probabilities of prompts: echo "
        works += "with logprobs of /v1/completions, as vLLM and SGLang have it. Tasks that generate answers work"
        raise refuse("task", task.name, f"{works}. Its answer: {error}") from None
