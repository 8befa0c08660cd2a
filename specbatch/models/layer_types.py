"""Kinds of layers in a config.json: `layer_types`, and which layers have sliding windows."""

from __future__ import annotations

from typing import Any

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, names_of

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(config: dict[str, Any], family: str, layers: int, positions: int) -> tuple[int | None, ...]:
    """The window of each layer. Empty if none has one, or if it is not shorter than the longest text."""
    # Without the key the classes of Mistral have a window of 4096. They do not read use_sliding_window. Qwen configs
    # state one that is off unless that is true. Llama has none; a config that states one is of another model.
    mistral = family in ("mistral", "ministral")
    stated = config.get("sliding_window", 4096 if mistral else None) is not None
    window = count_of(config, "sliding_window", 4096) if stated else None
    if not mistral and not flag_of(config, "use_sliding_window", family == "llama"):
        window = None
    kinds = names_of(config, "layer_types") if family != "mistral" else None  # whose layers are all of one kind
    if kinds is None:
        first = count_of(config, "max_window_layers", 28, least=0) if family in ("qwen2", "qwen3") else 0
        kinds = [FULL if window is None else SLIDING] * layers
        kinds[:first] = [FULL] * min(first, layers)
    check_kinds(kinds, layers, (FULL, SLIDING), "these families have")
    if SLIDING not in kinds:
        return ()
    if window is None:
        raise refuse("sliding_window", None, "layer_types has sliding layers, so it must be a number of tokens in use")
    if family == "llama":
        raise refuse("sliding_window", window, "Llama layers have full attention; with a window it is a Mistral")
    return tuple(window if kind == SLIDING else None for kind in kinds) if window < positions else ()


def attending(kinds: list[str], layers: int, known: tuple[str, str], family: str) -> tuple[bool, ...]:
    """Which layers of the list `layer_types` are attention. known: the names of the other kind and of attention;
    family: start of the error message."""
    check_kinds(kinds, layers, known, family)
    return tuple(kind == known[1] for kind in kinds)


def check_kinds(kinds: list[str], layers: int, known: tuple[str, str], family: str) -> None:
    """Refuse a list `layer_types` of another length, or with other than the `known` kinds. family: start of the error
    message."""
    if len(kinds) != layers:
        raise refuse("layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")
    for kind in kinds:
        if kind not in known:
            raise refuse("layer_types", kind, f"{family} {known[0]!r} and {known[1]!r} layers")
