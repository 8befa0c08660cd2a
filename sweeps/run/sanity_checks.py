"""Sanity checks of a point's outputs: warnings that its numbers may not measure what was asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.sweeps.workload.description import sha256_of
from specbatch.sweeps.workload.workloads import Workload
from specbatch.text.thinking import CLOSE, OPEN

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

TEMPLATE_MARKS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "<|user|>",
    "[INST]",
)  # written only by a chat template
DIGEST = 16  # hexadecimal digits
LONGEST_PERIOD = 16  # tokens
LEAST_LOOP = 32  # tokens at the end of an answer that repeat others


def warnings(
    workload: Workload, completions: list[Completion], params: list[SamplingParams], *, drafts: bool
) -> Iterator[str]:
    """Problems with the answers of a point, one line each. Aborted requests are ignored. drafts: the answers were
    drafted, so that loops count."""
    ended = [item for item in completions if item.is_complete]
    if not ended:
        return
    texts, limit = [whole_text(item) for item in ended], params[0].max_new_tokens

    def of_all(found: int) -> str:
        return f"{found} of {len(ended)} answers"

    sent, counted = (
        sum(of) for of in zip(*((len(i.prompt_token_ids), i.metrics.prompt_tokens) for i in ended), strict=True)
    )
    if sent != counted:
        yield f"{counted} input tokens were counted where {sent} were sent: the server tokenizes prompts differently"
    if drafts and (loops := sum(ends_in_loop(item.token_ids) for item in ended)):
        yield f"{of_all(loops)} end in a loop, which is easy to draft: acceptance is higher than on other text"
    if workload.ignores_eos:
        short = [item for item in ended if item.metrics.output_tokens < params[item.index].max_new_tokens]
        cut = sum(item.finish_reason == "length" for item in short)  # vLLM ends an answer at its max_model_len
        if cut:
            works = "use shorter prompts or answers, or start it with a larger one"
            yield f"{of_all(cut)} were cut off at the server's maximum length of prompt and answer: {works}"
        if len(short) > cut:
            yield f"{of_all(len(short) - cut)} are shorter than requested: the engine stops at end tokens"
        return
    thought = sum(
        bool(item.metrics.reasoning_tokens) or OPEN in text or CLOSE in text
        for item, text in zip(ended, texts, strict=True)
    )
    if workload.thinking is False and thought:
        yield f"{of_all(thought)} contain {OPEN} though thinking is off: the model was not trained to answer without it"
    if workload.thinking and not thought:
        yield f"no answer contains {OPEN} or {CLOSE} though thinking is on: the model does not reason, or hides it"
    unended = sum(
        (OPEN in text and CLOSE not in text) or item.metrics.reasoning_tokens == item.metrics.output_tokens > 0
        for item, text in zip(ended, texts, strict=True)
    )
    if unended:
        yield f"{of_all(unended)} end inside their reasoning: use more than {limit} output tokens"
    if all(item.finish_reason == "length" for item in ended):
        base = ", or the model is a base model, which does not end its turn" if workload.is_rendered else ""
        own = " or max_new_tokens of the rows" if any(row.sampling for row in workload.rows) else ""
        yield f"all answers were cut off at {limit} tokens: use a larger --output-len{own}{base}"
    marked = sum(any(mark in text for mark in TEMPLATE_MARKS) for text in texts)
    if marked:
        cause = "a base model with a chat template continues with the user's turn"
        other = "a chat model needs --chat-template"
        yield f"{of_all(marked)} contain special tokens of a chat template: {cause if workload.is_rendered else other}"
    empty = sum(item.metrics.output_tokens <= 1 and item.finish_reason == "stop" for item in ended)
    if 2 * empty > len(ended):
        yield f"{of_all(empty)} are empty: try {'--no-chat-template' if workload.is_rendered else '--chat-template'}"


def whole_text(completion: Completion) -> str:
    """Reasoning that a server split off, and text."""
    return (completion.reasoning or "") + completion.text


def add_digests(rows: Iterable[dict[str, Any]], answers: dict[int, Completion]) -> None:
    """Add to each row of a record what its answer was, so that answers can be compared. A server reports no tokens.
    answers: by the index of a row."""
    for row in rows:
        if (answer := answers.get(row["index"])) is not None and answer.is_complete:
            row["text_digest"] = sha256_of([whole_text(answer)])[:DIGEST]
            if answer.token_ids:
                row["token_digest"] = sha256_of([answer.token_ids])[:DIGEST]


def retokenized(tokenizer: Tokenizer, completions: Iterable[Completion]) -> int:
    """Tokens of the texts of complete answers, encoded again."""
    texts = (whole_text(item) for item in completions if item.is_complete)
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the last `LEAST_LOOP` tokens repeat the ones before them, with a period of up to `LONGEST_PERIOD`."""
    return any(
        all(tokens[-at] == tokens[-at - period] for at in range(1, LEAST_LOOP + 1))
        for period in range(1, LONGEST_PERIOD + 1)
        if len(tokens) >= LEAST_LOOP + period
    )
