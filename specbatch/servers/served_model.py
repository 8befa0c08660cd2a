"""What a server says of itself: its models, its version, and the tokenizer that belongs to a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeGuard

from specbatch.errors import SpecbatchError, refuse
from specbatch.servers import client as http_client
from specbatch.servers.client import ERRORS, StatusError, describe
from specbatch.servers.server import Server

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

NAME_LENGTH = 200  # of a model, which becomes the name of a folder
VERSION = {"/version": "version", "/server_info": "version", "/props": "build_info"}  # vLLM, SGLang, llama.cpp
VLLM, SGLANG, LLAMACPP = "vllm", "sglang", "llamacpp"  # owned_by of their models


def model_of(server: Server) -> dict[str, Any]:
    """The server's description of the requested model."""
    url, wanted = server.base_url, server.model
    try:
        models = [item for item in json.loads(ask_text(server, "/v1/models"))["data"] if is_name(item["id"])]
    except (LookupError, TypeError, RecursionError, json.JSONDecodeError):
        raise refuse("base_url", url, "/v1/models did not answer with OpenAI's list of models") from None
    except ERRORS as error:
        if isinstance(error, StatusError) and error.status in (401, 403):
            works = f"the server at {url} refuses it ({error}); name the environment variable with its key"
            raise refuse("api_key_env", server.api_key_env, works) from None
        raise refuse("base_url", url, f"no answer from /v1/models ({describe(error)}); is the server up?") from None
    names = http_client.one_line(", ".join(item["id"] for item in models), 1_000)
    if wanted is None and len(models) == 1:
        return dict(models[0])
    found = next((item for item in models if item["id"] == wanted), None)
    if found is None:
        works = f"; name one, such as model={models[0]['id']!r}" if models else ""
        raise refuse("model", wanted, f"the server at {url} has {names or 'none'}{works}")
    return dict(found)


def tokenizer_of(server: Server, found: dict[str, Any], log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of the model that `found` describes."""
    from specbatch.weights import open_tokenizer

    if server.tokenizer is not None:
        return open_tokenizer(server.tokenizer, log)
    root = found.get("root")
    name = root if is_name(root) else found["id"]
    try:
        return open_tokenizer(name, log)
    except SpecbatchError as error:
        works = f"that of the server's model {name} is not available here; give its folder or .gguf file ({error})"
        raise refuse("tokenizer", None, works) from None


def version_of(server: Server) -> str | None:
    """The server's own version, if it has an endpoint for that."""
    for path, key in VERSION.items():
        with suppress(ValueError, RecursionError):
            found = json.loads(get_text(server, path))
            if isinstance(found, dict) and is_name(version := found.get(key)):
                return version
    return None


def get_text(server: Server, path: str, body: Any = None) -> str:
    """The text at `path`, of the answer to a POST of `body` if there is one; "" without an answer."""
    with suppress(*ERRORS):
        return ask_text(server, path, method="GET" if body is None else "POST", body=body)
    return ""


def ask_text(server: Server, path: str, *, method: str = "GET", body: Any = None) -> str:
    """As `get_text`. Raises one of ERRORS without an answer."""
    url, headers = server.base_url + path, server.headers
    return asyncio.run(http_client.read_text(url, headers, method=method, body=body))


def is_name(model: object) -> TypeGuard[str]:
    """Whether a model can be named in messages, tables and folders."""
    return isinstance(model, str) and model.isprintable() and 0 < len(model) <= NAME_LENGTH
