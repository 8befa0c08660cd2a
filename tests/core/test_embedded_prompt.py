"""Prompts with embeddings of some positions: answers equal those of transformers, with chunks, drafts, retractions and
the prefix cache, which never matches such prompts by their token ids alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf
from crossed import first_quick
from targets import Targets

from specbatch import EmbeddedPrompt, Engine, EngineConfig, SamplingParams, SpecbatchError, Speculation

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3.5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**SIZES, **DELTA)),
}
SELF = Speculation("standalone", draft="self:skip=1")
RUNS = {
    "llama": [(Speculation("none", schedule="v1"), 100), (SELF, 5)],
    "qwen3.5": [(Speculation("none"), 5), (Speculation("ngram", schedule="v1", ngram_min=1), 100)],
}


@pytest.mark.parametrize("name", first_quick(1, MODELS))
def test_answers_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Also with cached prefixes of the same tokens and other embeddings."""
    torch.manual_seed(3)
    theirs = MODELS[name]().eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter[0].numel() ** 0.5)
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({f"w{token}": token for token in range(61)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    prompts, wanted = [], []
    drawn = torch.randint(0, 61, (23,))
    for length, parts in (
        (23, {3: 6, 12: 1}),
        (23, {3: 6, 12: 1}),
        (11, {0: 11}),
        (14, {13: 1}),
        (14, {}),
        (14, {6: 3}),
    ):
        tokens = drawn[:length]
        inputs = theirs.get_input_embeddings()(tokens).detach()
        given = {start: torch.randn(count, 32) for start, count in parts.items()}
        for start, values in given.items():
            inputs[start : start + len(values)] = values
        prompts.append(EmbeddedPrompt(tokens.tolist(), given))
        inputs_of = {"inputs_embeds": inputs[None], "attention_mask": torch.ones(1, length)}
        found = theirs.generate(**inputs_of, max_new_tokens=8, do_sample=False)
        wanted.append(found[0].tolist())
    for speculation, chunk in RUNS[name]:
        config = EngineConfig(str(tmp_path), device="cpu", max_running=3, page_size=4, prefill_chunk=chunk,
                              max_model_len=64, speculation=speculation)  # fmt: skip
        with Engine(config) as engine:
            for _ in range(3):  # the second time prefixes are cached, the third time their states
                done = engine.generate(prompts, GREEDY)
                assert [item.token_ids for item in done] == wanted
            assert [item.metrics.cached_tokens for item in done] == [0, 0, 0, 12, 12, 4]
            assert [item.metrics.embedded_tokens for item in done] == [7, 7, 11, 1, 0, 3]


def embedded(checkpoint: Any, tokens: list[int], parts: list[range]) -> EmbeddedPrompt:
    """`tokens` with the embeddings of some of them, whose ids are replaced by another id."""
    embedding = checkpoint.tensors[checkpoint.config.names.embedding]
    written = [3 if any(place in part for part in parts) else token for place, token in enumerate(tokens)]
    return EmbeddedPrompt(written, {part.start: embedding[tokens[part.start : part.stop]] for part in parts})


@pytest.mark.parametrize(
    ("name", "algorithm"),
    first_quick(1, [
        ("qwen3.5", "mtp"), ("qwen3-next", "eagle"), ("lfm2", "eagle3"), ("lfm2", "dflash"),
        ("qwen3-moe", "model-tree"),
    ]),
)  # fmt: skip
def test_drafter_reads_the_same_embeddings(targets: Targets, name: str, algorithm: str) -> None:
    """With the embeddings of other tokens everything is as with these tokens, also in the KV cache of the draft."""
    whole, kept, few = targets.prompts(name)[:4], [], SamplingParams(max_new_tokens=4, ignore_eos=True)
    parts = [range(2, 5), range(7, 8)]
    for hides in (False, True):
        more = {"draft": "self:skip=1"} if algorithm == "model-tree" else None
        engine = targets.engine(name, algorithm, more=more, prefill_chunk=5, prefix_cache=False)
        prompts = [embedded(targets.checkpoint(name), p, parts) if hides and len(p) > 8 else p for p in whole]
        done = engine.generate(prompts, few)
        drafter = engine.parts.worker.decode_step.drafter
        cache = drafter._cache if algorithm == "dflash" else drafter.cache
        kept.append((cache.keys.clone(), cache.values.clone()))
        assert [item.token_ids for item in done] == targets.greedy(name, 4)[:4]
    assert sum(isinstance(prompt, EmbeddedPrompt) for prompt in prompts) >= 2
    for with_tokens, with_embeddings in zip(*kept, strict=True):
        assert torch.equal(with_tokens, with_embeddings)


def test_retracted_request_uses_its_embeddings_again(targets: Targets) -> None:
    prompts, checkpoint = targets.prompts("lfm2")[:3], targets.checkpoint("lfm2")
    engine = targets.engine("lfm2", "ngram", "v1")
    events = engine.stream([embedded(checkpoint, prompt, [range(len(prompt))]) for prompt in prompts], GREEDY)
    found = {event.index: event.completion for event in [next(events)]}
    for request in list(engine.parts.scheduler._running):
        engine.parts.scheduler._retract(request)
    found |= {event.index: event.completion for event in events}
    assert [found[index].token_ids for index in range(3)] == targets.greedy("lfm2", 8)[:3]  # type: ignore[union-attr]
    assert sum(item.metrics.retractions for item in found.values() if item is not None) >= 2


ROWS = torch.ones(2, 40)


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        ({3: ROWS}, "[2, 40] at 3: use [n, 40] with n from 1 to 1"),
        ({0: ROWS[:, :39]}, "[2, 39] at 0: use [n, 40]"),
        ({0: ROWS[0]}, "[40] at 0"),
        ({0: ROWS[:0]}, "[0, 40] at 0"),
        ({4: ROWS}, "4: positions go from 0 to 3"),
        ({-1: ROWS}, "-1: positions"),
        ({"0": ROWS}, "0: positions"),
        ({0: ROWS.long()}, "torch.int64 at 0: give tensors of floating point"),
        ({0: ROWS.tolist()}, "list at 0: give tensors"),
        ({0: ROWS * torch.nan}, "values that are not finite at 0"),
        ({1: ROWS, 0: ROWS}, "2 rows at 0: those of position 1 overlap"),
        ([ROWS], "list: give tensors by their first position"),
    ],
)
def test_invalid_embeddings_are_refused(embeddings: Any, message: str) -> None:
    with pytest.raises(SpecbatchError) as caught:
        EmbeddedPrompt([3, 4, 5, 6], embeddings).checked(0, 40)
    assert str(caught.value).replace("'", "").startswith(f"embeddings of prompt 0={message}")
