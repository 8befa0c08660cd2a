"""The options of `specbatch check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbatch.config.settings import FLAG, check_fields, setting, whole
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import refuse

RANDOM_PROMPTS = 32
SAMPLED = ("math-table", "list-json", "dialogue-shop")  # of the bundled ones: texts that repeat themselves, and one
REFEREES = ("float32", "same", "none")
PROBES = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop", "max_tokens", "usage", "min_tokens", "logit_bias", "logprobs", "response_format",
)  # fmt: skip


@dataclass(frozen=True)
class CheckOptions:
    """What is compared.

    source: JSONL as in `specbatch.jobs.prompts`; None: the prompts that come with the package, or random ones
    """

    source: Path | None = None
    random: bool = setting(
        False,
        "Random token ids as prompts; each continues for exactly --max-new-tokens. They find memory errors at any "
        "length and need no tokenizer, but a model of real weights is chaotic on them in bfloat16 and float16.",
        FLAG,
    )
    prompts: int | None = setting(
        None,
        f"Number of prompts. Default: all of them, {RANDOM_PROMPTS} random ones, or {len(SAMPLED)} with --sampled.",
        whole(1),
    )
    input_len: int = setting(64, "Tokens per random prompt.", whole(1))
    max_new_tokens: int = setting(48, "Maximum number of tokens per answer.", whole(1))
    concurrency: int = setting(16, "Maximum number of requests in flight.", whole(1))
    chat_template: bool = setting(True, "Render messages with the model's chat template.", FLAG)
    referee: str = setting(
        "float32",
        "The model that judges tokens, without engine and cache. float32: in that type; it is loaded after the engines "
        "are closed. same: in the engines' type. none: every difference counts.",
        choices=REFEREES,
    )
    sampled: bool = setting(
        False,
        "Compare the distribution of sampled tokens with the exact one, instead of greedy tokens with the baseline's.",
        FLAG,
    )
    seeds: int = setting(500, "With --sampled: requests per prompt and set of sampling parameters.", whole(50))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.random and self.source is not None:
            raise refuse("random", True, "a file has the prompts; leave one of them out")
        if self.sampled and self.random:
            raise refuse("random", True, "sampled needs prompts of text; leave one of them out")
        if self.sampled and self.referee == "none":
            raise refuse("referee", self.referee, "the exact distribution is the referee's; use float32 or same")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=self.random)

    @property
    def max_model_len(self) -> int | None:
        """Length that random prompts need; None if it depends on the tokenizer."""
        return self.input_len + self.max_new_tokens if self.random else None


def probes_of(name: str, text: str) -> tuple[str, ...]:
    """The value of --probes."""
    if text in ("all", "none"):
        return PROBES if text == "all" else ()
    found = tuple(part.strip().replace("-", "_") for part in text.split(","))
    if unknown := [part for part in found if part not in PROBES]:
        raise refuse(name, unknown[0], f"use all, none, or some of {', '.join(PROBES)}")
    return found


@dataclass(frozen=True)
class ServerOptions:
    """What a server is compared with, and which of its settings are probed."""

    baseline_url: str | None = setting(
        None, "A second server with the same model, such as one without drafts: the other side of the comparison."
    )
    weights: str | None = setting(
        None,
        "The server's weights (folder, hub id, known name, .gguf): this engine without drafts is the other side, and "
        "the model in float32 the referee.",
        metavar="MODEL",
    )
    quantized: bool = setting(
        False,
        "The server quantizes the --weights to fewer bits than 16: the referee allows for that. Quantized activations "
        "of a server with quantized files it allows for in any case.",
    )
    probes: tuple[str, ...] = setting(
        PROBES, "Settings to probe: all, none, or some of them, such as temperature,stop.", parse=probes_of
    )

    def __post_init__(self) -> None:
        if self.baseline_url is not None and self.weights is not None:
            raise refuse("weights", self.weights, "there is a baseline_url as well; use one of them")
        if self.quantized and self.weights is None:
            raise refuse("quantized", True, "is for the referee; add weights, or leave it out")
