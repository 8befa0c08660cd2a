"""`specbatch check --engine http`: does a server answer as the same model does without drafts, batches and caches?

The server answers each prompt alone with an empty prefix cache, alone again, so that its prefix cache has the prompt,
and all prompts at once. Each time the tokens should be those of the other side: a second server, this engine with the
same weights, or the server's own first answers. Divergences are judged by the referee
(`specbatch.sweeps.check.verdict`) where weights are given, else by the log-probabilities of the server
(`specbatch.sweeps.check.compared`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from specbatch.config.engine_config import EngineConfig
from specbatch.core.completion import Completion
from specbatch.errors import refuse
from specbatch.progress.bars import Report
from specbatch.servers.engine import HttpEngine
from specbatch.servers.replies import WITH_IDS, Question, Reply, Shown, Token, ask
from specbatch.servers.served_model import LLAMACPP
from specbatch.sweeps.check import prompts as check_prompts
from specbatch.sweeps.check.compared import TextOf, bound_of, compare, most_of, noise
from specbatch.sweeps.check.options import CheckOptions, ServerOptions
from specbatch.sweeps.check.probes import Probes
from specbatch.sweeps.check.quantized import OF_ACTIVATIONS, OF_WEIGHTS, QuantizedReport
from specbatch.sweeps.check.referee import RefereePlan, plan_referee
from specbatch.sweeps.check.report import Answer, CheckReport, Finding
from specbatch.sweeps.check.run import Log, Progress, both, find_divergence, judged_by
from specbatch.sweeps.check.server_report import Condition, ServerReport
from specbatch.sweeps.run.loading import load_engine

if TYPE_CHECKING:
    from specbatch.records.run_record import RunRecord
    from specbatch.text.tokenizer import Tokenizer

ANSWERS = "answers.jsonl"
ALONE, AGAIN, TOGETHER, PROBE = "alone", "again", "together", "probe"
_WITHOUT_DRAFTS = {"speculative.n_max": 0}  # of llama.cpp; vLLM and SGLang have nothing for one request
_TOP = (20, 5)  # most likely tokens that are asked for; some servers allow fewer


class Requests:
    """Sends requests, and writes every answer into a file as it comes."""

    def __init__(self, prompts: list[list[int]], file: IO[str], progress: Progress) -> None:
        self.prompts, self._file, self._progress = prompts, file, progress

    def replies(
        self, engine: HttpEngine, condition: str, requests: Sequence[tuple[int, dict[str, Any]]], concurrency: int,
    ) -> list[Reply]:  # fmt: skip
        """requests: prompts by number, with the fields of the request."""

        def note(place: int, reply: Reply) -> None:
            prompt, fields = requests[place]
            row = {"server": engine.server.base_url, "condition": condition, "prompt": prompt, "fields": fields}
            self._file.write(json.dumps(row | reply.as_row()) + "\n")
            self._file.flush()
            if condition != PROBE:
                self._progress()

        questions = [Question(self.prompts[prompt], fields) for prompt, fields in requests]
        return ask(engine, questions, concurrency=concurrency, on_reply=note)

    def of_all(
        self, engine: HttpEngine, condition: str, fields: dict[str, Any], concurrency: int = 1
    ) -> list[Reply]:  # fmt: skip
        """The replies to all prompts."""
        return self.replies(engine, condition, [(place, fields) for place in range(len(self.prompts))], concurrency)

    def until_drafts(self, engine: HttpEngine, condition: str, fields: dict[str, Any]) -> list[Reply] | None:
        """The replies to all prompts; None if one had drafts, after which no more are asked for."""
        found: list[Reply] = []
        for place in range(len(self.prompts)):
            found += self.replies(engine, condition, [(place, fields)], 1)
            if found[-1].drafted:
                self._progress.more(len(found) - len(self.prompts))
                return None
        return found


def run_server(
    engine: HttpEngine,
    options: CheckOptions,
    server: ServerOptions,
    folder: Path,
    *,
    baseline: HttpEngine | None = None,
    own: EngineConfig | None = None,
    seed: int = 0,
    log: Log | None = None,
    report: Report | None = None,
) -> ServerReport:
    """Compare a server with another one (`baseline`), with this engine (`own`) or with itself, probe its settings, and
    write what was found into `folder`, which exists."""
    plan = None if own is None or options.referee == "none" else plan_referee(own, options.referee)
    prompts, names, read = prompts_of(engine, options, seed, log)
    if baseline is not None and engine.server.send == "chat":
        baseline.know_messages(prompts, [engine.messages_of(prompt) for prompt in prompts])
    shown = shown_by(engine, prompts[0])
    greedy = {"temperature": 0.0, "max_tokens": options.max_new_tokens, **shown.fields}
    greedy |= {"ignore_eos": True} if options.random else {}
    if own is not None and not shown.ids:  # the text has to tell all tokens
        greedy["skip_special_tokens"] = False
    is_llamacpp = engine.kind == LLAMACPP
    switches = is_llamacpp and baseline is None and own is None
    progress = Progress(report, len(prompts) * (3 + (baseline is not None or own is not None or switches)))
    engine.reset_record()
    plain = [] if own is None else _own_answers(own, prompts, options, log, progress)
    with (folder / ANSWERS).open("w") as file:
        requests = Requests(prompts, file, progress)
        wanted: list[Reply] | None = [_as_reply(item) for item in plain] or None
        if baseline is not None:
            baseline.forget_prefixes()
            wanted = requests.of_all(baseline, "baseline", greedy | shown_by(baseline, prompts[0]).fields)
        elif switches:
            wanted = requests.until_drafts(engine, "without drafts", greedy | _WITHOUT_DRAFTS)
        engine.forget_prefixes()
        alone = requests.of_all(engine, ALONE, greedy)
        again = requests.of_all(engine, AGAIN, greedy | ({"cache_prompt": True} if is_llamacpp else {}))
        engine.forget_prefixes()
        together = requests.of_all(engine, TOGETHER, greedy, options.concurrency)
        answers = {ALONE: alone, AGAIN: again, TOGETHER: together}
        if wanted is None:
            wanted = answers.pop(ALONE)

        def text_of(tokens: Sequence[Token]) -> str:
            texts = [token for token in tokens if isinstance(token, str)]
            ids = [token for token in tokens if not isinstance(token, str)]
            return "".join(texts) or engine.tokenizer.decode(ids)

        conditions = [_condition(name, wanted, found, text_of) for name, found in answers.items()]
        noises = [value for one in conditions for value in one.noises]
        bound = bound_of(noises)
        conditions = [one.judged(bound, most_of(noises)) for one in conditions]
        record = engine.record(concurrency=options.concurrency)
        referee: dict[str, CheckReport] = {}
        most_error: float | None = None
        if own is not None:
            sides = {
                (name, place): _answer(reply, plain[place], engine.tokenizer)
                for name, found in answers.items()
                for place, reply in enumerate(found)
                if reply.error is None
            }
            has_files = is_llamacpp or (plan is not None and plan.has_quantized_weights)
            most_error = OF_WEIGHTS if server.quantized else OF_ACTIVATIONS if has_files else None
            referee = _judged(plan, plain, sides, names, options, record, log, progress, most_error)
            conditions = [one.only_shapes() for one in conditions]  # the referee judges the others
        is_faulty = any(one.is_faulty for one in conditions) or any(one.faults for one in referee.values())
        probes = Probes(
            lambda sent: requests.replies(engine, PROBE, sent, options.concurrency if len(sent) > 1 else 1),
            prompts,
            shown.fields,
            bound,
            lambda text: engine.tokenizer.encode(text, add_special_tokens=False),
            lambda tokens: engine.tokenizer.decode(tokens, skip_special_tokens=False),
            length=options.max_new_tokens,
            greedy=dict(enumerate(alone)) if not options.random else None,
            doubt="answers at temperature 0 are faulty" if is_faulty else "",
            end=engine.tokenizer.eos_id,
            is_llamacpp=is_llamacpp,
        )
        progress.more(len(server.probes))
        probed = probes.run(server.probes, progress)
    record.workload = {
        **check_prompts.describe(options, prompts, seed, read),
        "baseline_url": server.baseline_url,
        "weights": server.weights,
        "quantized": most_error is not None,
    }
    against = _against(engine, baseline, own, switched=None if not switches else ALONE in answers)
    result = ServerReport(options, engine.server, against, shown, conditions, noises, bound, referee, probed, record)
    record.workload |= result.summary()
    result.save(folder)
    return result


def prompts_of(
    engine: HttpEngine, options: CheckOptions, seed: int, log: Log | None
) -> tuple[list[list[int]], list[str | int | None], int | None]:
    """Token ids of the prompts with their names, and how many were read, None of random ones. The server renders
    messages itself."""
    rows = check_prompts.read(options, log)
    if engine.server.send != "chat":
        return *check_prompts.encode(rows, options, engine, seed), None if rows is None else len(rows)
    if rows is None:
        raise refuse("random", True, "token ids cannot be sent as messages; leave it out, or send ids")
    rows = [row.as_message() for row in rows]
    messages = {tuple(row.encode(engine.tokenizer)): row.value for row in rows}
    prompts, names = check_prompts.encode(rows, options, engine, seed)
    engine.know_messages(prompts, [messages[tuple(prompt)] for prompt in prompts])
    return prompts, names, len(rows)


def shown_by(engine: HttpEngine, prompt: list[int]) -> Shown:
    """How the server shows tokens and log-probabilities. Raises SpecbatchError if it answers nothing."""
    chat = engine.server.send == "chat"
    tries: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count} for count in _TOP
    ]
    for fields in [*({**WITH_IDS, **one} for one in tries), *tries, dict(WITH_IDS), {}]:
        reply = ask(engine, [Question(prompt, {"temperature": 0.0, "max_tokens": 4, **fields})])[0]
        if reply.error is None:
            return Shown(fields, bool(reply.ids), bool(reply.top))
        if reply.status in (401, 403):
            works = f"the server at {engine.server.base_url} refuses it ({reply.error}); name the variable of its key"
            raise refuse("api_key_env", engine.server.api_key_env, works)
        if not reply.is_refused:
            break
    raise refuse("base_url", engine.server.base_url, f"a completion of 4 tokens fails: {reply.error}")


def _condition(name: str, wanted: list[Reply], found: list[Reply], text_of: TextOf) -> Condition:
    others = {place: reply for place, reply in enumerate(wanted) if reply.error is None}
    errors = [reply.error for reply in found if reply.error is not None]
    pairs = [(place, others[place], reply) for place, reply in enumerate(found)
             if reply.error is None and place in others]  # fmt: skip
    parted = [compare(place, name, own, reply, others, text_of) for place, own, reply in pairs]
    noises = [value for _, own, reply in pairs if (value := noise(own, reply)) is not None]
    lost = [reply.error for reply in wanted if reply.error is not None]
    return Condition(name, len(pairs), errors, lost, [one for one in parted if one is not None], noises)


def _own_answers(
    config: EngineConfig, prompts: list[list[int]], options: CheckOptions, log: Log | None, progress: Progress
) -> list[Completion]:
    """Of this engine without drafts."""
    longest = max(map(len, prompts)) + options.max_new_tokens
    plain, _ = both(replace(config, max_model_len=config.max_model_len or longest))
    with ExitStack() as stack:
        engine = stack.enter_context(load_engine("baseline", plain, log, weights_of=None))
        params = replace(options.params, logprobs=True)
        return engine.generate(prompts, params, concurrency=options.concurrency, on_completion=progress)


def _answer(reply: Reply, own: Completion, tokenizer: Tokenizer) -> Answer:
    """The tokens of a server; of one that shows no ids, those of its text. own: what this engine answered, which tells
    the tokens of an equal text, and the end token that a server may not show."""
    tokens = reply.ids or _tokens_of(reply.text, own, tokenizer)
    logprobs = reply.logprobs if reply.ids and len(reply.logprobs) == len(tokens) else None
    if reply.finish_reason == "stop" and tokenizer.eos_id is not None and tokens[-1:] != [tokenizer.eos_id]:
        is_equal = own.finish_reason == "stop" and tokens == own.token_ids[:-1]
        tokens, logprobs = [*tokens, own.token_ids[-1] if is_equal else tokenizer.eos_id], None
    return Answer(tokens, logprobs)


def _tokens_of(text: str, own: Completion, tokenizer: Tokenizer) -> list[int]:
    """Of a text: as far as it is that of this engine, the tokens of this engine, then those of the tokenizer."""
    ids = list(own.token_ids)
    while not text.startswith(shared := tokenizer.decode(ids, skip_special_tokens=False)):
        ids.pop()
    ends = ids[-1:] == [tokenizer.eos_id]
    return [*(ids[:-1] if ends else ids), *tokenizer.encode(text[len(shared) :], add_special_tokens=False)]


def _as_reply(own: Completion) -> Reply:
    """An answer of this engine as that of a server."""
    ids = list(own.token_ids)
    logprobs = own.logprobs or []
    return Reply(own.text, ids, list(ids), logprobs, finish_reason=own.finish_reason, error=own.error)


def _judged(
    plan: RefereePlan | None,
    plain: list[Completion],
    sides: dict[tuple[str, int], Answer],
    names: list[str | int | None],
    options: CheckOptions,
    record: RunRecord,
    log: Log | None,
    progress: Progress,
    most_error: float | None,
) -> dict[str, CheckReport]:
    """By condition, the answers of the server (by condition and prompt) and of this engine, judged by the referee.
    most_error: nats per token that its quantization explains; None: it does not quantize."""
    findings: list[Finding] = []
    for (_, place), answer in sides.items():
        own = plain[place]
        equal, diverges = find_divergence(own.token_ids, answer.tokens)
        first = Answer(own.token_ids, own.logprobs, error=own.error)
        index = len(findings)  # that of the prompt follows
        findings.append(Finding(index, names[place], equal, diverges, first, answer, own.prompt_token_ids))
    dtype = "float32" if plan is None else str(plan.engine_dtype).removeprefix("torch.")
    record.caps["dtype"] = dtype
    if plan is not None:
        findings = judged_by(plan, findings, dtype, log, progress)
    parts: dict[str, list[Finding]] = {}
    for (name, place), item in zip(sides, findings, strict=True):
        parts.setdefault(name, []).append(replace(item, index=place))
    if most_error is None:
        return {name: CheckReport(options, part, record) for name, part in parts.items()}
    return {name: QuantizedReport(options, part, record, most_error) for name, part in parts.items()}


def _against(
    engine: HttpEngine, baseline: HttpEngine | None, own: EngineConfig | None, *, switched: bool | None
) -> str:
    """What the answers were compared with, and what that cannot find. switched: whether the server left drafts out
    where a request said so; None: none said so."""
    if baseline is not None:
        return f"the server at {baseline.server.base_url}, each prompt alone; assumed: it has the same weights"
    if own is not None:
        return f"this engine with {own.model}, without drafts; assumed: these are the server's weights"
    if switched:
        return "its own answers with speculative.n_max=0, each prompt alone (it drafted nothing then)"
    ignores = switched is False
    why = "drafts all the same with speculative.n_max=0" if ignores else "cannot switch drafts off for a request"
    return (
        f"its own answers to each prompt alone. The server {why}, so a fault that all its answers have is not found; "
        "--baseline-url or --weights finds it"
    )
