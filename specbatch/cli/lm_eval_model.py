"""specbatch as a model of lm-eval: `lm_eval --model specbatch --model_args pretrained=MODEL,spec=v2`.

    import specbatch.cli.lm_eval_model                     # registers it
    lm_eval.simple_evaluate("specbatch", "pretrained=qwen2.5-coder-1.5b,spec=v2", ["gsm8k"])

`specbatch lm-eval` is lm-eval's command with it. An import is needed: lm-eval 0.4.13 knows the models of its own table
and those registered with `register_model`, and looks for no entry points.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from lm_eval.api.registry import register_model

from specbatch.cli.options import ENGINE_OPTIONS, EngineOptions
from specbatch.cli.output import open_replicas
from specbatch.config.field_errors import did_you_mean
from specbatch.errors import MOST_SEED, SpecbatchError, refuse
from specbatch.evals.generation import LIMITS, Generation
from specbatch.evals.lm import SpecBatchLM
from specbatch.evals.lm_eval_files import MODEL, TokenizerInfo, model_info
from specbatch.evals.options import EvalOptions
from specbatch.progress.bars import progress

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from specbatch.config.engine_config import EngineConfig
    from specbatch.records.run_record import RunRecord

_OTHER_NAMES = {"pretrained": "model", "max_length": "max_model_len"}  # of options, in lm-eval's models
# Of `EvalOptions`: by lm-eval's name, as its models for transformers and for servers have it.
_OF_ANSWERS: dict[str, tuple[str, type]] = {
    "max_gen_toks": ("max_new_tokens", int),
    "num_concurrent": ("concurrency", int),
    "enable_thinking": ("thinking", bool),
    "think_end_token": ("think_end_token", str),
    "add_bos_token": ("add_bos_token", bool),
    "truncation": ("truncate_prompts", bool),
}
_BATCH = ("batch_size", "max_batch_size")  # lm-eval's options of these names
_IN_PROCESS = "the engine runs in this process and needs no server; leave it out, or use --model local-completions"
_CODE = "trust_remote_code"  # permits what does not happen here: code of a checkpoint never runs
_DEVICE = "cuda:0"  # lm-eval's default, also on a machine without a GPU, where its model for transformers uses the CPU


@register_model(MODEL)
class SpecBatchModel(SpecBatchLM):
    """A model of lm-eval that builds its engine from `--model_args`: the options of `specbatch` commands by name, and
    those of `_OTHER_NAMES` and `_OF_ANSWERS`.

    max_gen_toks    limit of answers where the task states none
    num_concurrent  most requests in flight, also the default of max_running
    batch_size, max_batch_size  the same, where num_concurrent is not given; "auto" and lm-eval's default of 1 leave it
                    to the engine
    device          lm-eval's default, cuda:0, leaves it to the engine, too
    seed            of sampled answers; by default torch's, which lm-eval's --seed sets

    The engine is closed when the model is deleted, or by `close`.
    """

    cache_hook: Any
    _kept: ClassVar[list[SpecBatchModel] | None] = None

    def __init__(self, **arguments: Any) -> None:
        asked = {name: _plain(value) for name, value in arguments.items() if value is not None and name != _CODE}
        if asked.get("device") == _DEVICE:
            del asked["device"]
        asked.setdefault("seed", torch.initial_seed() % (MOST_SEED + 1))  # lm-eval has set it from --seed
        config, options = _settings(asked)
        self._options, self._in_chat = options, False
        stack = ExitStack()
        engine = stack.enter_context(open_replicas(config))
        self._finalizer = weakref.finalize(self, stack.close)
        super().__init__(engine, MODEL, **self._own(chat_template=False))
        self.tokenizer = TokenizerInfo(engine.tokenizer)
        if SpecBatchModel._kept is not None:
            SpecBatchModel._kept.append(self)

    @classmethod
    @contextmanager
    def built(cls) -> Iterator[list[SpecBatchModel]]:
        """The models that lm-eval builds in the block, which it drops after its run. They are closed at the end."""
        kept: list[SpecBatchModel] = []
        cls._kept = kept
        try:
            yield kept
        finally:
            cls._kept = None
            for model in kept:
                model.close()

    def close(self) -> None:
        """Free the engine."""
        self._finalizer()

    @property
    def max_length(self) -> int:
        return self._longest

    def record(self) -> RunRecord:
        """All work so far."""
        return self._engine.record(concurrency=self._concurrency)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval adds to `results["config"]` after a run."""
        return model_info(self.record())

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not self._in_chat:  # lm-eval says so to no model when it is built
            hook, self._in_chat = self.cache_hook, True
            super().__init__(self._engine, MODEL, **self._own(chat_template=True))
            self.cache_hook = hook
        return super().apply_chat_template(chat_history, add_generation_prompt)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if self._options.thinking is not None and not self._in_chat:
            works = "is a switch of the chat template; add --apply_chat_template"
            raise refuse("enable_thinking", self._options.thinking, works)
        with self._shown(requests):
            return super().generate_until(requests)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        with self._shown(requests):
            return super().loglikelihood(requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        with self._shown(requests):
            return super().loglikelihood_rolling(requests)

    def _own(self, *, chat_template: bool) -> dict[str, Any]:
        """Arguments of `SpecBatchLM`."""
        own = self._options.of_model | {"chat_template": chat_template, "max_new_tokens": None}
        return own | {"concurrency": self._options.concurrency}

    def _generation(self, wanted: dict[str, Any]) -> Generation:
        if self._options.max_new_tokens is not None and not any(name in wanted for name in LIMITS):
            wanted = wanted | {"max_gen_toks": self._options.max_new_tokens}
        return super()._generation(wanted)

    @contextmanager
    def _shown(self, requests: list[Instance]) -> Iterator[None]:
        """Show the progress of the requests, and name their tasks in errors."""
        self._task = ", ".join(dict.fromkeys(str(request.task_name) for request in requests)) or MODEL
        with progress(self._task, "requests") as report:
            done = 0

            def on_answer(_: object, wanted: int) -> None:
                nonlocal done
                done += 1
                report(done, wanted)

            self._on_answer = on_answer
            yield


def _plain(value: Any) -> Any:
    """Paths, dtypes and devices, which Python programs give, as the command writes them."""
    return str(value).removeprefix("torch.") if isinstance(value, Path | torch.dtype | torch.device) else value


def _settings(arguments: Mapping[str, Any]) -> tuple[EngineConfig, EvalOptions]:
    """The engine's configuration and how answers are made. Refused: unknown arguments, and values of a wrong type."""
    if (server := arguments.get("base_url")) is not None:
        raise refuse("base_url", server, _IN_PROCESS)
    known = [*_OTHER_NAMES, *ENGINE_OPTIONS, *_OF_ANSWERS, *_BATCH]
    engine, answers = dict[str, Any](), dict[str, Any]()
    for name, value in arguments.items():
        if name not in known:
            raise refuse("model_args", name, f"is no argument of {MODEL}; {did_you_mean(name, known)}")
        if name in _OF_ANSWERS:
            own, kind = _OF_ANSWERS[name]
            if type(value) is not kind:
                works = {bool: "use true or false", int: "use a whole number", str: "use a text"}[kind]
                raise refuse(name, value, works)
            answers[own] = value
        elif name not in _BATCH:
            own = _OTHER_NAMES.get(name, name)
            if engine.setdefault(own, value) != value:
                raise refuse(name, value, f"{own} is given twice, also as {engine[own]!r}; leave one of them out")
    _add_batch(arguments, answers)
    options = EvalOptions(MODEL, **answers | ({"chat_template": True} if "thinking" in answers else {}))
    return _with_types(engine).config(concurrency=options.concurrency), options


def _add_batch(arguments: Mapping[str, Any], answers: dict[str, Any]) -> None:
    """Add the concurrency that lm-eval's batch sizes ask for. Refused: two different ones."""
    for name in _BATCH:
        value = arguments.get(name)
        if value is None or str(value).partition(":")[0] == "auto" or str(value) == "1":
            continue
        if not str(value).isdecimal() or int(value) < 1:
            raise refuse(name, value, "use a whole number of at least 1, or auto")
        if answers.setdefault("concurrency", int(value)) != int(value) and name == "batch_size":
            other = f"num_concurrent={answers['concurrency']}"
            raise refuse(name, value, f"differs from {other}, which means the same here; leave one of them out")


def _with_types(settings: Mapping[str, Any]) -> EngineOptions:
    """The options of these values, which lm-eval's parser has typed by their form. A list is that of an option with
    commas."""
    options = EngineOptions()
    shown = {own: other for other, own in _OTHER_NAMES.items() if own != "model"}
    for name, value in settings.items():
        texts = str in (get_args(kind := ENGINE_OPTIONS[name].type) or (kind,))
        given = ",".join(map(str, value)) if texts and isinstance(value, list | tuple) else value
        try:
            options = options.updated({name: given}, "")
        except SpecbatchError as error:
            raise refuse("model_args", f"{shown.get(name, name)}={value}", str(error.works)) from None
    return options
