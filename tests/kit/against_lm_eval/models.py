"""Checkpoint folders that transformers and specbatch load alike: tiny random chat models, and the bundled one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from specbatch.jobs.questions import bundled_questions
from specbatch.weights import open_checkpoint

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURNS + PROMPT
WITH_BOS = "{{ bos_token }}" + CHATML
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + WITH_BOS
THINKING = WITH_BOS.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
TRIMMED = WITH_BOS.replace("m.content", "m.content | trim")


def _byte_level(more: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE, trained on questions of GSM8K."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    found.train_from_iterator((row["question"] for row in bundled_questions("gsm8k").rows), trainer)
    found.add_tokens(list(more))
    return found


def _byte_fallback() -> Tokenizer:
    """As SentencePiece writes it: spaces are `▁`, and characters without a piece are bytes."""
    fallback = [f"<0x{value:02X}>" for value in range(256)]
    letters = [chr(code) for code in range(33, 127)] + ["▁"]
    pairs = [("▁", letter) for letter in "abcdefghijklmnopqrstuvwxyz"] + [
        ("▁t", "h"),
        ("i", "n"),
        ("e", "r"),
        ("a", "n"),
    ]
    pieces = ["<unk>", *SPECIAL, *fallback, *letters, *("".join(pair) for pair in pairs)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    found = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(["<unk>", *SPECIAL])
    return found


def _with_bos(backend: Tokenizer) -> Tokenizer:
    """Every text begins with <s>."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def write_tiny(
    folder: Path,
    *,
    backend: Callable[[], Tokenizer] = _byte_level,
    bos: bool = True,
    template: str | None = WITH_BOS,
    seed: int = 3,
    longest: int = 8192,
    described: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    favored: Sequence[str] = (),
) -> Path:
    """A random Llama model, with a tokenizer that begins plain text with <s>, unless not `bos`.

    longest     of texts, in tokens
    described   more of tokenizer_config.json
    generation  more of generation_config.json
    favored     texts whose last tokens are likelier than others
    """
    made = _with_bos(backend()) if bos else backend()
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    size = made.get_vocab_size(with_added_tokens=True)
    end = made.token_to_id("<|im_end|>")
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=longest, tie_word_embeddings=False,
        bos_token_id=made.token_to_id("<s>"), eos_token_id=end,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter[0].numel() ** 0.5)
        for text in favored:
            model.lm_head.weight[made.encode(text, add_special_tokens=False).ids[-1]] *= 2.5
    model.generation_config.eos_token_id = end
    for name, value in (generation or {}).items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    named: dict[str, Any] = {"bos_token": "<s>"} if bos else {}
    named |= {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    named |= {"model_max_length": longest} | ({"chat_template": template} if template else {}) | (described or {})
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


NO_SYSTEM, TRIMS, OUTER_BOS = "tiny, no system messages", "tiny, its template trims", "tiny, BOS is not in its template"
PENALTY, SHORT, REASONS = "tiny, repetition_penalty 1.3 in its files", "tiny, 512 tokens long", "tiny, reasons"
SAYS_BOS, SAYS_NO_BOS = "tiny, add_bos_token, not in tokenizer.json", "tiny, no add_bos_token, in tokenizer.json"
CLEANED, SAMPLES = "tiny, cleans up spaces", "tiny, samples by its files"
BRIEF, CONCLUDES = "tiny, max_new_tokens 7 in its files", "tiny, ends its reasoning"
TINY: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny without BOS": {"bos": False, "template": CHATML},
    OUTER_BOS: {"template": CHATML},
    NO_SYSTEM: {"template": WITHOUT_SYSTEM},
    TRIMS: {"template": TRIMMED},
    "tiny, byte fallback": {"backend": _byte_fallback},
    PENALTY: {"generation": {"repetition_penalty": 1.3}},
    SHORT: {"longest": 512},
    SAYS_BOS: {"bos": False, "described": {"bos_token": "<s>", "add_bos_token": True}},
    SAYS_NO_BOS: {"template": CHATML, "described": {"add_bos_token": False}},
    CLEANED: {"described": {"clean_up_tokenization_spaces": True}, "favored": list(".,?!' ")},
    SAMPLES: {"generation": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.8}},
    BRIEF: {"generation": {"max_new_tokens": 7}},
    CONCLUDES: {"template": THINKING, "backend": partial(_byte_level, THINK), "favored": ["</think>"]},
    REASONS: {"template": THINKING, "backend": partial(_byte_level, THINK)},
}
BUNDLED = "smollm2-135m"


def write(name: str, folder: Path) -> Path:
    """The folder of a model: one of `TINY` or `BUNDLED`, whose converted folder specbatch has made (float32)."""
    if name != BUNDLED:
        return write_tiny(folder, **TINY[name])
    return Path(open_checkpoint(BUNDLED, "auto").folder)  # type: ignore[attr-defined]
