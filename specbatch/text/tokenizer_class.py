"""Whether the class of a tokenizer makes transformers split text otherwise than tokenizer.json says.

Many tokenizer classes of transformers 5 (in 5.24 those with an `__init__` of their own: GPT2Tokenizer, Qwen2Tokenizer,
GemmaTokenizer and others) take the vocabulary and merges from tokenizer.json, and make normalizer and pre-tokenizer
anew. The class is the `tokenizer_class` of tokenizer_config.json or config.json. Without it, and for some models
whatever it says, the class follows from the `model_type` of config.json. Here tokenizer.json is used as it is, and the
difference is reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_USE_THE_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
# Models whose class counts whatever `tokenizer_class` says (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in 5.24).
_OVERRULED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp")
_PARTS = ("normalizer", "pre_tokenizer")
_KEPT = ("tokenizer_class", "add_prefix_space", "do_lower_case", "strip_accents", "legacy")


def replaced_parts(
    backend: Any, tokenizer: dict[str, Any], described: dict[str, Any], config: dict[str, Any]
) -> list[str]:
    """A line for a class that replaces the normalizer or pre-tokenizer of tokenizer.json, else nothing.

    backend    the `tokenizers.Tokenizer` of tokenizer.json
    tokenizer, described, config   tokenizer.json, tokenizer_config.json and config.json
    """
    declared = described.get("tokenizer_class") or config.get("tokenizer_class")
    model = config.get("model_type")
    if (declared in _USE_THE_FILE and model not in _OVERRULED) or not (declared or model):
        return []
    name, theirs = _made_by_transformers(tokenizer, described | {"tokenizer_class": declared}, config)
    ours = json.loads(backend.to_str())
    differing = [part for part in _PARTS if name and _essence(theirs[part]) != _essence(ours[part])]
    if not differing:
        return []
    from transformers import __version__

    return [
        f"transformers {__version__} makes a {name} of these files (tokenizer_class: {declared}, model_type: {model}), "
        f"which replaces the {' and '.join(differing)} of tokenizer.json and may split texts into other tokens; here "
        "the file is used as it is"
    ]


def _made_by_transformers(
    tokenizer: dict[str, Any], described: dict[str, Any], config: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The class of the tokenizer that transformers makes of these files, and the tokenizer as JSON, with a small
    vocabulary, which takes no time. Empty where it cannot."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    vocabulary = tokenizer["model"].get("vocab")
    kept = {item["content"] for item in tokenizer.get("added_tokens") or []} | {tokenizer["model"].get("unk_token")}
    if isinstance(vocabulary, dict):
        known = [token for token in vocabulary if token in kept]
        vocabulary = {token: index for index, token in enumerate(known)}
    model = tokenizer["model"] | {"vocab": vocabulary} | ({"merges": []} if "merges" in tokenizer["model"] else {})
    files = {
        "tokenizer": tokenizer | {"model": model, "added_tokens": [], "post_processor": None},
        "tokenizer_config": {key: described[key] for key in _KEPT if key in described},
        "config": {"model_type": config["model_type"]} if "model_type" in config else {},
    }
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with TemporaryDirectory() as scratch:
            for stem, content in files.items():
                (Path(scratch) / f"{stem}.json").write_text(json.dumps(content))
            found = AutoTokenizer.from_pretrained(scratch, trust_remote_code=False, local_files_only=True)
            return type(found).__name__, json.loads(found.backend_tokenizer.to_str())
    except Exception:  # a class for another kind of vocabulary; each raises other errors
        return "", {}
    finally:
        logging.set_verbosity(level)


def _essence(part: Any) -> Any:
    """A normalizer or pre-tokenizer in one spelling: without options that concern offsets only, and without lists of
    one item or in each other."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    if inner is not None:
        return [item for one in inner for item in _essence(one)]
    return [{key: value for key, value in part.items() if key != "trim_offsets"}]
