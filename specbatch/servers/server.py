"""A server of another engine, and how requests are sent to it."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.settings import setting
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SAMPLED
from specbatch.errors import refuse

SENDS = ("ids", "text", "chat")
SENT = frozenset(
    {
        *(*SAMPLED, "seed", "max_new_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("skip_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)  # of the parameters of a prompt
CONCURRENCY = 32  # requests of an evaluation at a time, unless the user says otherwise
_OF_MODEL = ("model", "load_format", "tokenizer", "seed")  # settings that say what the numbers of a sweep are of


@dataclass(frozen=True)
class Server:
    """A server and how requests are sent to it.

    base_url     with or without /v1 at the end
    model        one of its models; None: the only one
    tokenizer    known name, folder or hub id; None: that of the model that the server reports
    send         "ids": prompts as token ids; "text": as text, which the server tokenizes; "chat": the messages of the
                 prompts, to /v1/chat/completions, which renders them with the server's chat template
    api_key_env  environment variable that holds the server's key
    idle_timeout     seconds without an event of the stream after which its request has failed
    request_timeout  seconds from sending a request to the end of its answer
    speculation  what the server was started with, for its records; it is not sent. None: not known
    thinking     "chat": `enable_thinking` of the template; None leaves it to the template
    seed         from which an evaluation derives those of sampled answers; a sweep has its own
    alongside    an engine of the same sweep, which must have the same model: the server's records name it, and the
                 prompts are made with its tokenizer
    """

    base_url: str = setting(help="An OpenAI-compatible server (vLLM, SGLang), such as http://localhost:8000.")
    model: str | None = None
    tokenizer: str | None = None
    send: str = setting(
        "ids",
        "Send prompts as token ids, so that the server cannot tokenize them differently, as text, or as messages to "
        "/v1/chat/completions.",
        choices=SENDS,
    )
    api_key_env: str | None = setting(
        None, "Name of the environment variable with the server's API key.", metavar="NAME"
    )
    idle_timeout: float = setting(300.0, "Seconds without a chunk of the answer after which a request has failed.")
    request_timeout: float = setting(3600.0, "Seconds after which a request that has not finished has failed.")
    speculation: Speculation | None = None
    thinking: bool | None = None
    seed: int | None = None
    alongside: EngineConfig | None = field(default=None, repr=False)
    prefix_cache: ClassVar[bool] = True  # the server may have one

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            secret = "@" in parts.netloc
        except ValueError:
            is_one, secret = False, False
        if not is_one:
            raise refuse("base_url", self.base_url, "give the server's address, such as http://localhost:8000")
        if secret:
            works = "leave user and password out, because records keep the address; api_key_env sends a key"
            raise refuse("base_url", f"{parts.scheme}://...@{parts.hostname}", works)
        if self.send not in SENDS:
            raise refuse("send", self.send, f"use one of {', '.join(SENDS)}")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise refuse("api_key_env", self.api_key_env, "no such environment variable; set it to the server's key")
        for name in ("idle_timeout", "request_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise refuse(name, seconds, "use a positive number of seconds")
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

    def as_dict(self) -> dict[str, Any]:
        """What its records are of. Timeouts can change when a sweep continues."""
        return {
            "model": self.model or "unknown",
            "server": f"server at {self.base_url}, prompts as {self.send}",
            "served_model": self.model,
            "tokenizer": self.tokenizer,
            "device": self.base_url,
            "dtype": "the server's own",
            "load_format": "auto",
            "send": self.send,
            "thinking": self.thinking,
            "api_key_env": self.api_key_env,
            "speculation": asdict(self.speculation or Speculation()),
            "speculation_known": self.speculation is not None,
            "graphs": asdict(Graphs()),
            "prefix_cache": "the server's own",
            **({} if self.seed is None else {"seed": self.seed}),
            **({name: getattr(self.alongside, name) for name in _OF_MODEL} if self.alongside is not None else {}),
        }

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {}
