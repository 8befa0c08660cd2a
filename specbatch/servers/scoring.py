"""Log-probabilities of given continuations by a server that gives those of a prompt: `echo` with `logprobs` of
/v1/completions, as vLLM and SGLang have it.

A text is sent as token ids, and one token is generated and dropped: not every release takes `max_tokens` 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import aiohttp

from specbatch.config.settings import is_number
from specbatch.servers import client as http_client
from specbatch.servers.client import CONNECT_S, Failed, Unanswered, describe
from specbatch.servers.server import Server

if TYPE_CHECKING:
    from specbatch.engine.scoring import Likelihood, Pair, Tally

OnScore = Callable[[int, "Likelihood"], None]


class Scores:
    """The client for them. is_used: whether there are any yet, for a record, which has the numbers of `tally`."""

    def __init__(self, server: Server, model: str) -> None:
        self._server, self._model = server, model
        self.is_used = False

    @cached_property
    def tally(self) -> Tally:
        from specbatch.engine.scoring import Tally

        self.is_used = True
        return Tally()

    def check(self, pair: Pair) -> None:
        """Raises Failed if the server does not give the log-probabilities of this text."""

        async def ask() -> Likelihood:
            async with self._session() as session:
                return await self._ask(session, pair)

        try:
            asyncio.run(ask())
        except http_client.ERRORS as error:
            raise Failed(describe(error)) from None

    def of(self, pairs: Sequence[Pair], concurrency: int, on_score: OnScore | None) -> list[Likelihood | str]:
        """The likelihood of each, or the reason why there is none."""
        start = time.perf_counter()
        found = asyncio.run(self._all(pairs, concurrency, on_score))
        given = [place for place, one in enumerate(found) if not isinstance(one, str)]
        checked = [(list(pairs[place][0]), list(pairs[place][1])) for place in given]
        likelihoods = [one for one in found if not isinstance(one, str)]
        self.tally.add(checked, likelihoods, time.perf_counter() - start)
        return found

    def _session(self, *, reuse: bool = True) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._server.request_timeout, sock_connect=CONNECT_S)
        return http_client.session(self._server.headers, timeout, reuse=reuse)

    async def _all(self, pairs: Sequence[Pair], concurrency: int, on_score: OnScore | None) -> list[Likelihood | str]:
        found = dict[int, "Likelihood | str"]()

        async def work(session: aiohttp.ClientSession, index: int) -> None:
            try:
                found[index] = likelihood = await self._ask(session, pairs[index])
            except http_client.ERRORS as error:
                found[index] = describe(error)
                return
            if on_score is not None:
                on_score(index, likelihood)

        await http_client.in_flight(len(pairs), concurrency, self._session(), work)
        return [found[index] for index in range(len(pairs))]

    async def _ask(self, session: aiohttp.ClientSession, pair: Pair) -> Likelihood:
        context, continuation = pair
        body = {"model": self._model, "prompt": [*context, *continuation], "max_tokens": 1, "temperature": 0}
        body |= {"echo": True, "logprobs": 1, "stream": False}
        try:
            answer = await self._post(session, body)
        except Unanswered:
            async with self._session(reuse=False) as fresh:
                answer = await self._post(fresh, body)
        except TimeoutError:
            raise Failed(f"not finished after {self._server.request_timeout:g} s, the timeout of a request") from None
        return likelihood_of(answer, len(context), len(context) + len(continuation))

    async def _post(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
        url = f"{self._server.base_url}/v1/completions"
        async with session.post(url, json=body, allow_redirects=False) as response:
            await http_client.check_status(response)
            return await http_client.read_json(response)


def likelihood_of(answer: Any, begin: int, end: int) -> Likelihood:
    """The likelihood of the tokens of a prompt from `begin` to `end`, by the answer of /v1/completions. Raises
    Failed for an answer without log-probabilities of each of these tokens."""
    from specbatch.engine.scoring import Likelihood

    try:
        logprobs = answer["choices"][0]["logprobs"]
        chosen, top = logprobs["token_logprobs"], logprobs["top_logprobs"]
        counts = len(chosen), len(top)
    except (LookupError, TypeError):
        raise Failed("the answer has no log-probabilities (echo with logprobs)") from None
    if counts not in ((end, end), (end + 1, end + 1)):
        raise Failed(
            f"the answer has log-probabilities of {counts[0]} tokens for a prompt of {end}, echoed, and 1 more"
        )
    values, greedy = list[float](), True
    for place in range(begin, end):
        value, best = chosen[place], top[place]
        others = list(best.values()) if isinstance(best, dict) else []
        if not all(map(is_number, [value, *others])) or not others:
            raise Failed(f"the answer has no log-probability of token {place} of the prompt")
        values.append(value)
        greedy &= value >= max(others)
    return Likelihood(math.fsum(values), greedy)
