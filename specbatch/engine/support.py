"""The support matrix of `specbatch doctor`: which drafts, model families and settings run together on this machine.

Each entry is the answer of the checks of an engine: an `EngineConfig` is constructed and prepared, for random
weights of a named shape, so that nothing is loaded. A combination of settings runs if each of them runs with the draft
and no two of them are in `CONFLICTS`; `tests/engine/test_support.py` tries the combinations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION
from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.engine.ranks.ranks import checked
from specbatch.errors import SpecbatchError
from specbatch.weights.shapes import SHAPES, SUPPORT_MATRIX

FAMILIES: Final = SUPPORT_MATRIX
_DRAFT_MODEL = "MODEL"


def _drafts() -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Drafts by title: algorithm and `Speculation.draft`."""
    for name, entry in ALGORITHMS.items():
        if name == NO_SPECULATION or entry.alias_of:
            continue
        if entry.drafts_by_model:
            yield name, (name, _DRAFT_MODEL)
            yield "self:skip", (name, "self:skip=1-1")
        else:
            yield name, (name, "dummy" if entry.draft else None)


DRAFTS: Final = dict(_drafts())
_TREE = {"draft_topk": 2}
# Settings: fields of Speculation, Graphs and EngineConfig that differ from the default.
SETTINGS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "chain": ({}, {}, {}),
    "tree (--draft-topk)": (_TREE, {}, {}),
    "--draft-tokens auto": ({"draft_tokens": "auto"}, {}, {}),
    "--spec v1": ({"schedule": "v1"}, {}, {}),
    "--spec v2": ({"schedule": "v2"}, {}, {}),
    "--verification token": ({"verification": "token"}, {}, {}),
    "--verification block": ({"verification": "block"}, {}, {}),
    "--verify-budget": ({"verify_budget": 1.5}, {}, {}),
    "--corpus run": ({"corpus": "run"}, {}, {}),
    "--simulate-accept-length": ({"simulate_accept_length": 1.5}, {}, {}),
    "--decode-graph whole": ({}, {"decode": "whole"}, {}),
    "--prefill-graph piecewise": ({}, {"prefill": "piecewise"}, {}),
    "--dtype float32": ({}, {}, {"dtype": "float32"}),
    "--dtype bfloat16": ({}, {}, {"dtype": "bfloat16"}),
    "--dtype float16": ({}, {}, {"dtype": "float16"}),
    "--kv-dtype fp8": ({}, {}, {"kv_dtype": "fp8"}),
    "--tensor-parallel 2": ({}, {}, {"tensor_parallel": 2}),
    "--deterministic": ({}, {}, {"deterministic": True}),
}
# Settings that do not combine with each other, whatever drafts.
CONFLICTS: Final = (
    ("tree (--draft-topk)", "--draft-tokens auto"),
    ("tree (--draft-topk)", "--verification block"),
    ("tree (--draft-topk)", "--corpus run"),
    ("tree (--draft-topk)", "--verify-budget"),
    ("--draft-tokens auto", "--verify-budget"),
    ("--verification block", "--verify-budget"),
    ("--verify-budget", "--simulate-accept-length"),
    ("--verify-budget", "--tensor-parallel 2"),
    ("--verification block", "--corpus run"),
    ("--verification block", "--simulate-accept-length"),
    ("--verification block", "--deterministic"),
    ("--tensor-parallel 2", "--deterministic"),
)
_SMALL = "qwen3-0.6b"  # the target of settings


@dataclass(frozen=True)
class Support:
    """Whether a target or a setting runs with a draft. why: the refusal; empty if it runs."""

    what: str
    draft: str
    why: str

    @property
    def runs(self) -> bool:
        return not self.why


def of_families(device: str = "auto") -> Iterator[Support]:
    """Each family with a chain of each draft."""
    with _draft_models(FAMILIES.values()) as models:
        for family, shape in FAMILIES.items():
            for draft in DRAFTS:
                yield Support(family, draft, refusal(draft, shape, models[shape], device=device))


def of_settings(device: str = "auto") -> Iterator[Support]:
    """Each setting with each draft, for one target with attention in all layers."""
    with _draft_models([_SMALL]) as models:
        for setting in SETTINGS:
            for draft in DRAFTS:
                yield Support(setting, draft, refusal(draft, _SMALL, models[_SMALL], [setting], device=device))


def refusal(draft: str, shape: str, draft_model: str, settings: Iterable[str] = (), *, device: str = "auto") -> str:
    """The error of an engine with these settings; empty if it can be built."""
    speculation: dict[str, Any] = {}
    graphs: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for setting in settings:
        for values, changes in zip((speculation, graphs, engine), SETTINGS[setting], strict=True):
            values.update(changes)
    algorithm, source = DRAFTS[draft]
    source = draft_model if source is _DRAFT_MODEL else source
    try:
        config = EngineConfig(
            shape,
            load_format="dummy",
            device=device,
            speculation=Speculation(algorithm, draft=source, **speculation),
            graphs=Graphs(**graphs),
            **engine,
        )
        checked(config, lambda line: None)
    except SpecbatchError as error:
        return str(error)
    return ""


@contextmanager
def _draft_models(shapes: Iterable[str]) -> Iterator[Mapping[str, str]]:
    """By the shape of a target, the config.json of a small draft model with its vocabulary."""
    with TemporaryDirectory(prefix="specbatch-") as folder:
        found = {}
        for shape in shapes:
            config = {**SHAPES[_SMALL], "vocab_size": _vocabulary(SHAPES[shape])}
            path = Path(folder, shape, "config.json")
            path.parent.mkdir()
            path.write_text(json.dumps(config))
            found[shape] = str(path)
        yield found


def _vocabulary(config: Mapping[str, Any]) -> int:
    return int(config.get("text_config", config)["vocab_size"])
