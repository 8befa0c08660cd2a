"""The engine as lm-eval sees it: a model that generates.

lm = SpecBatchLM(engine, "gsm8k")
lm_eval.simple_evaluate(model=lm, tasks=["gsm8k"])
lm.answers                                     # every request's Completion, beside lm-eval's scores
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from specbatch.errors import refuse
from specbatch.request import Completion, SamplingParams
from specbatch.thinking import answer_of, opens_thinking

if TYPE_CHECKING:
    from specbatch.engine import Engine

MAX_NEW_TOKENS = 512  # where neither the user nor the task says; lm-eval's own 256 cuts chains of thought short
_SAMPLING = ("top_p", "top_k", "min_p")
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", *_SAMPLING}


class Answer(NamedTuple):
    """One finished request and the document of the task it answers."""

    doc_id: int
    completion: Completion


class SpecBatchLM(LM):  # type: ignore[misc]
    """Hands lm-eval's whole request list to `engine.generate`, so that the engine does the batching.

    task            named in refusals
    max_new_tokens  budget of every answer; None leaves it to the task, or `MAX_NEW_TOKENS`
    chat_template   whether prompts come rendered by `apply_chat_template` and so bring their special tokens
    thinking        the template's `enable_thinking`; None leaves it to the template
    concurrency     as for `Engine.generate`
    on_answer       called with each Answer as it finishes and the number of requests there are

    After the run `answers` holds every Answer and `prompts` every prompt, in the order of the requests, and `budget`
    the largest answer length that was allowed.
    """

    def __init__(
        self,
        engine: Engine,
        task: str,
        *,
        max_new_tokens: int | None = None,
        chat_template: bool = False,
        thinking: bool | None = None,
        concurrency: int | None = None,
        on_answer: Callable[[Answer, int], None] | None = None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._task = task
        self._max_new_tokens = max_new_tokens
        self._chat_template = chat_template
        self._switch = {} if thinking is None else {"enable_thinking": thinking}
        self._concurrency = concurrency
        self._on_answer = on_answer
        self._token_ids: dict[str, int] | None = None
        self.answers: list[Answer] = []
        self.prompts: list[str] = []
        self.budget = 0

    @property
    def tokenizer_name(self) -> str:
        return self._engine.tokenizer.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation. Without the generation prompt its last message is the start of the answer."""
        render = self._engine.tokenizer.apply_chat_template
        if add_generation_prompt:
            return render(chat_history, **self._switch)
        return render(chat_history[:-1], **self._switch) + chat_history[-1]["content"]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers' texts in the order of `requests`, each cut at its first stop string and without reasoning."""
        params = [self._params(request.args[1]) for request in requests]
        encode = self._engine.tokenizer.encode
        tokens = [encode(item.args[0], add_special_tokens=not self._chat_template) for item in requests]
        for request, prompt, wanted in zip(requests, tokens, params, strict=True):
            self._refuse_too_long(request, len(prompt), wanted.max_new_tokens)

        def finished(completion: Completion) -> None:
            if self._on_answer is not None:
                self._on_answer(Answer(requests[completion.index].doc_id, completion), len(requests))

        completions = self._engine.generate(tokens, params, concurrency=self._concurrency, on_completion=finished)
        texts = [
            answer_of(completion.text, opened=opens_thinking(request.args[0]))
            for request, completion in zip(requests, completions, strict=True)
        ]
        for request, completion, text in zip(requests, completions, texts, strict=True):
            self.answers.append(Answer(request.doc_id, completion))
            self.prompts.append(request.args[0])
            self.cache_hook.add_partial("generate_until", request.args, text)
        self.budget = max([self.budget, *(item.max_new_tokens for item in params)])
        return texts

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        raise refuse("task", self._task, "needs log-likelihoods of given texts; use a generating task, such as gsm8k")

    def loglikelihood_rolling(self, requests: list[Instance]) -> NoReturn:
        self.loglikelihood(requests)

    def _params(self, wanted: dict[str, Any]) -> SamplingParams:
        """lm-eval's generation arguments as ours. Sampling without a temperature means temperature 1."""
        temperature = 1.0 if wanted.get("do_sample") else 0.0
        kwargs = normalize_gen_kwargs({"temperature": temperature, **wanted}, default_max_gen_toks=MAX_NEW_TOKENS)
        unknown = sorted(set(kwargs) - _KNOWN)
        if unknown:
            works = f"this engine takes {', '.join(sorted(_KNOWN))}; use another task"
            raise refuse("task", self._task, f"asks for {', '.join(unknown)}, and {works}")
        stops = tuple(text for text in kwargs["until"] if text)
        return SamplingParams(
            temperature=kwargs["temperature"],
            max_new_tokens=self._max_new_tokens or kwargs["max_gen_toks"],
            stop=stops,
            stop_token_ids=self._stop_tokens(stops),
            **{name: kwargs[name] for name in _SAMPLING if kwargs.get(name) is not None},
        )

    def _stop_tokens(self, stops: tuple[str, ...]) -> tuple[int, ...]:
        """Stop strings that are tokens: special tokens such as <|im_end|> never show up in the text."""
        if self._token_ids is None:
            self._token_ids = {text: token for token, text in enumerate(self._engine.tokenizer.vocabulary())}
        return tuple(self._token_ids[text] for text in stops if text in self._token_ids)

    def _refuse_too_long(self, request: Instance, prompt: int, budget: int) -> None:
        context = self._engine.caps["max_model_len"]
        if prompt + budget > context:
            raise refuse(
                "max_model_len",
                context,
                f"question {request.doc_id} of {self._task} has {prompt} prompt tokens and may be answered with "
                f"{budget}; use at least {prompt + budget}, fewer examples (num_fewshot) or a smaller max_new_tokens",
            )
