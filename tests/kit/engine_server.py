"""An OpenAI-compatible server on loopback that runs this engine on a tiny model, with the fields of vLLM, and faults.

The faults stand between the client and the engine: what they change of a request or an answer is all that is wrong.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import CHATML, SPECIAL
from local_server import NOT_FOUND, QuietHandler, listening
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbatch.config.engine_config import EngineConfig, Speculation
from specbatch.core.request import Completion, SamplingParams
from specbatch.engine.engine import Engine
from specbatch.errors import SpecbatchError
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import tensor_shapes

LETTERS = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(LETTERS) + len(SPECIAL),
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": len(LETTERS),
    "eos_token_id": len(LETTERS) + 1,
}  # fmt: skip
SHARPNESS = 3.5  # of the head: the most likely token has about half of the probability
GIVEN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "skip_special_tokens",
)  # fmt: skip


def write_letters(folder: Path, seed: int = 0) -> Path:
    """A checkpoint whose tokens are the characters of ASCII, so that every answer is text and can be JSON."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(ModelConfig.from_dict(CONFIG))
    weights = {
        name: torch.randn(shape, generator=generator) * (1.0 / shape[-1] ** 0.5)
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }
    weights["lm_head.weight"] *= SHARPNESS
    (folder / "model.safetensors").write_bytes(save(weights))
    found = Tokenizer(models.BPE({token: index for index, token in enumerate([*LETTERS, *SPECIAL])}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(SPECIAL)
    (folder / "tokenizer.json").write_text(found.to_str())
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    described["chat_template"] = CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [CONFIG["eos_token_id"]]}))
    return folder


def letters_engine(folder: Path, dtype: str = "float32", **speculation: Any) -> Engine:
    drafts = Speculation("ngram", draft_tokens=3, ngram_min=1, schedule="v1") if not speculation else None
    config = EngineConfig(
        model=str(folder), device="cpu", dtype=dtype, max_running=32, max_model_len=256,
        speculation=drafts or Speculation(**speculation),
    )  # fmt: skip
    return Engine(config)


@dataclass
class EngineServer:
    """A server.

    faults    of `FAULTS`
    shows     whether it sends token ids and log-probabilities
    key       that it asks for
    most      requests that it answers
    """

    engine: Engine
    faults: frozenset[str] = frozenset()
    shows: bool = True
    key: str | None = None
    most: int | None = None
    requests: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    held: list[tuple[threading.Event, list[Completion]]] = field(default_factory=list)
    jobs: queue.Queue[Any] = field(default_factory=queue.Queue)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Give the engine all requests that wait, until None comes."""
        while (first := self.jobs.get()) is not None:
            batch = [first]
            while len(batch) < 32:
                try:
                    batch.append(self.jobs.get(timeout=0.002))
                except queue.Empty:
                    break
            ends = batch[-1] is None
            batch = [job for job in batch if job is not None]
            done = self.engine.generate([prompt for prompt, _, _ in batch], [params for _, params, _ in batch])
            if "swaps two answers" in self.faults and len(done) > 1:
                done[0], done[1] = done[1], done[0]
            for (_, _, reply), completion in zip(batch, done, strict=True):
                reply.put(completion)
            if ends:
                return

    def complete(self, prompt: list[int], body: dict[str, Any]) -> Completion:
        """Raises SpecbatchError for fields that the engine refuses."""
        params = self.params(body)
        self.engine.check(prompt, params)
        reply: queue.Queue[Completion] = queue.Queue()
        self.jobs.put((prompt, params, reply))
        return reply.get()

    def params(self, body: dict[str, Any]) -> SamplingParams:
        values = {name: body[name] for name in GIVEN if body.get(name) is not None}
        values["max_new_tokens"] = body["max_tokens"] - ("drops a token of max_tokens" in self.faults)
        if values.get("top_k") == -1:
            values["top_k"] = 0
        for name, fault in IGNORING.items():
            if fault in self.faults:
                values.pop(name, None)
        if values.get("seed") is None:
            values["seed"] = secrets.randbits(31)
        if "ignores temperature" in self.faults:
            values["temperature"] = 1.0
        if body.get("logprobs") is not None:
            values |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        form = body.get("response_format")
        if form is not None and "ignores response_format" not in self.faults:
            values["json_schema"] = form["json_schema"]["schema"]
        return SamplingParams(**values)

    def pieces(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[str], Completion]:
        """The text of each token, and the answer."""
        done = self.complete(prompt, body)
        tokens, text = list(done.token_ids), done.text
        with self.lock:
            again = tuple(prompt) in self.seen
            self.seen.add(tuple(prompt))
        place = min(2, len(tokens) - 1)
        if "repeats a token after a prefix hit" in self.faults and again and place > 0:
            tokens = [*tokens[:place], tokens[place - 1], *tokens[place:-1]]
            text = self.engine.tokenizer.decode(tokens)
            done.token_ids[:] = tokens
            for shown in (done.logprobs, done.top_logprobs):
                if shown:
                    shown[:] = [*shown[:place], shown[place - 1], *shown[place:-1]]
        shown = self.engine.tokenizer
        hides = body.get("skip_special_tokens", True)
        parts = [shown.decode([token], skip_special_tokens=hides) for token in tokens]
        left, found = text, []
        for part in parts:  # what a stop string cuts is not shown
            found.append(left[: len(part)])
            left = left[len(part) :]
        if body.get("stop") and done.finish_reason == "stop":
            if "keeps a token of a stop" in self.faults:
                found[-1] += body["stop"][0][:1]
            elif "loses a token before a stop" in self.faults:
                found[len(text) - 1] = ""
        return found, done


IGNORING = {
    name: f"ignores {name}"
    for name in (
        "seed", "top_p", "top_k", "min_p", "stop", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty",
        "repetition_penalty",
    )
}  # fmt: skip
FAULTS = (
    "ignores temperature",
    "ignores response_format",
    *IGNORING.values(),
    "repeats a token after a prefix hit",
    "keeps a token of a stop",
    "loses a token before a stop",
    "swaps two answers",
    "counts tokens twice",
    "drops a token of max_tokens",
    "cuts streams",
    "wrong log-probabilities",
)


@contextmanager
def serving_engine(server: EngineServer) -> Iterator[str]:
    """The server's address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                self.send_text(401, '{"error":"Unauthorized"}')
            elif self.path == "/v1/models":
                root, longest = server.engine.config.model, server.engine.caps["max_model_len"]
                card = {"id": "letters", "root": root, "owned_by": "test", "max_model_len": longest}
                self.send_text(200, json.dumps({"data": [card]}))
            else:
                self.send_text(*NOT_FOUND)

        def do_POST(self) -> None:
            body = json.loads(self.body() or "{}")
            if self.path not in ("/v1/completions", "/v1/chat/completions"):
                self.send_text(*NOT_FOUND)
                return
            if "messages" in body:
                body["prompt"] = server.engine.tokenizer.apply_chat_template(body["messages"])
                body["logprobs"] = body.pop("top_logprobs", None)
            with server.lock:
                server.requests += 1
                number = server.requests
            if server.most is not None and number > server.most:
                self.send_text(500, '{"error":{"message":"stopped"}}')
                return
            prompt = body["prompt"]
            if isinstance(prompt, str):
                prompt = server.engine.tokenizer.encode(prompt)
            try:
                parts, done = server.pieces(prompt, body)
            except (SpecbatchError, TypeError, LookupError) as error:
                self.send_text(400, json.dumps({"error": {"message": str(error)}}))
                return
            self._stream(body, prompt, parts, done, cut="cuts streams" in server.faults and number % 5 == 0)

        def _stream(self, body: Any, prompt: list[int], parts: list[str], done: Completion, *, cut: bool) -> None:
            self.begin_events()
            tokens = done.token_ids
            for index, (part, token) in enumerate(zip(parts, tokens, strict=True)):
                if cut and index == len(parts) // 2:
                    return
                said = {"delta": {"content": part}} if "messages" in body else {"text": part}
                choice: dict[str, Any] = {"index": 0, **said, "finish_reason": None}
                if index == len(parts) - 1:
                    choice["finish_reason"] = done.finish_reason
                if server.shows and body.get("return_token_ids"):
                    choice["token_ids"] = [token]
                if server.shows and done.logprobs is not None and done.top_logprobs is not None:
                    wrong = 0.7 if "wrong log-probabilities" in server.faults and index % 3 == 1 else 0.0
                    top = {f"token_id:{name}": value - wrong for name, value in done.top_logprobs[index].items()}
                    name, value = f"token_id:{token}", done.logprobs[index]
                    choice["logprobs"] = {"tokens": [name], "token_logprobs": [value], "top_logprobs": [top]}
                    if "messages" in body:
                        likely = [{"token": other, "logprob": each} for other, each in top.items()]
                        choice["logprobs"] = {"content": [{"token": name, "logprob": value, "top_logprobs": likely}]}
                self.send_event({"choices": [choice]})
            count = len(tokens) * (2 if "counts tokens twice" in server.faults else 1)
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            self.send_event({"choices": [], "usage": usage})
            self.send_event("[DONE]")

    worker = threading.Thread(target=server.run, daemon=True)
    worker.start()
    try:
        with listening(Handler) as address:
            yield address
    finally:
        server.jobs.put(None)
        worker.join()
