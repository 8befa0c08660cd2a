"""How the prefix cache of a server is kept from answering a point with what it computed for earlier ones.

* SGLang: `POST /flush_cache`.
* vLLM: `POST /reset_prefix_cache`, if it was started with VLLM_SERVER_DEV_MODE=1; else a `cache_salt` for each point,
  so that only prompts of the same point share their beginnings.
* llama.cpp: no endpoint, but `cache_prompt: false` in each request.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from specbatch.servers.client import ERRORS, StatusError, describe

EMPTYING = ("/flush_cache", "/reset_prefix_cache")  # SGLang, vLLM
NOT_EMPTIED = "NOT EMPTIED"
RETRY_S = 0.1
EMPTYING_S = 5.0  # for which a server that is not idle yet is asked again


class ServerCache:
    """The prefix cache of a server.

    fields  of every request
    state   for records: how the last point was kept from it, or why not
    """

    def __init__(self, owner: str | None, post: Callable[[str], str], *, used: bool = False) -> None:
        """owner: `owned_by` of the server's model. post: the answer to a POST of a path; raises one of ERRORS. used:
        requests use it where they can be kept from it."""
        self._owner, self._post = owner, post
        self.fields: dict[str, Any] = {"cache_prompt": False} if owner == "llamacpp" and not used else {}
        usual = "used" if used else "not emptied yet"
        self.state = "not used (cache_prompt=false)" if self.fields else usual

    def forget(self) -> None:
        """Keep what follows from using what came before."""
        if self._owner == "llamacpp":
            return
        self.state = self._empty()
        if self._owner == "vllm" and self.state.endswith(_NO_ENDPOINT):
            self.fields = {"cache_salt": secrets.token_hex(8)}
            self.state = "with a cache_salt of its own for each point"

    def _empty(self) -> str:
        """How it was emptied, or why it was not. A server refuses while it still ends a request: SGLang with status
        400, vLLM with {"success": false}."""
        for path in EMPTYING:
            end = time.monotonic() + EMPTYING_S
            while True:
                try:
                    if _is_success(self._post(path)):
                        return f"emptied by {path}"
                    problem = "success=false"
                except StatusError as error:
                    if error.status in (404, 405):
                        break
                    problem = str(error)
                except ERRORS as error:
                    return f"{NOT_EMPTIED}: {path}: {describe(error)}"
                if time.monotonic() > end:
                    return f"{NOT_EMPTIED}: {path} answered {problem}"
                time.sleep(RETRY_S)
        return f"{NOT_EMPTIED}: {_NO_ENDPOINT}"


_NO_ENDPOINT = "the server has no endpoint for that"


def _is_success(answer: str) -> bool:
    """Whether an answer with status 200 to a request to empty the cache means that it is empty."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return True  # SGLang's is a sentence, that of earlier versions of vLLM is empty
    return not isinstance(found, dict) or found.get("success") is not False
