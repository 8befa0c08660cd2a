"""`specbatch doctor`: shows the environment, the devices and which features run here."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from specbatch.algorithms import ALGORITHMS
from specbatch.cli.options import ENGINE_OPTIONS, Json
from specbatch.cli.output import show
from specbatch.cli.terminal import print_markdown
from specbatch.config.flags import GRAPHS, Flag, in_text
from specbatch.extras import is_installed, missing
from specbatch.progress.bars import progress
from specbatch.records.environment import hardware, versions

HUB = ("huggingface.co", 443)


def doctor(as_json: Json = False) -> None:
    """Show the environment, the devices and which features run on this machine, with reasons.

    The support matrix shows which drafts run with which family of targets, and which settings with which drafts. It is
    made by the checks that refuse a configuration.
    """
    found: dict[str, Any] = {}
    for examine, text in SECTIONS:
        found |= examine()
        if not as_json:
            print_markdown(f"{text(found)}\n")
    if as_json:
        show("", found, as_json=True)


def _environment() -> dict[str, Any]:
    from specbatch.weights.cache import cache_folder

    return {"versions": versions(), "hardware": hardware(), "devices": _devices(), "cache": str(cache_folder())}


def _features() -> dict[str, Any]:
    import torch

    from specbatch.weights import known_models

    models = known_models.rows()
    cuda = torch.cuda.is_available()
    return {
        "models": models,
        "features": [
            _feature("engine on the CPU", None, "torch; float32 unless --dtype is given"),
            _feature("engine on a GPU", None if cuda else _no_gpu(), "CUDA, eager or with CUDA graphs"),
            _feature("bfloat16 on the GPU", _no_bfloat16(), "the default, if it is the checkpoint's type"),
            _feature("tensor parallelism on GPUs", _no_peers(), "--tensor-parallel N"),
            _feature("CUDA graphs", None if cuda else _no_gpu(), "--decode-graph whole, --prefill-graph piecewise"),
            *(
                _feature(
                    f"model {row['name']}",
                    None if row["here"] == "yes" else f"not downloaded; specbatch models pull {row['name']}",
                    "in the cache",
                )
                for row in models
            ),
            _feature("models and data of the hub", _no_hub(), f"{HUB[0]} answers"),
            _feature(
                "Triton kernels",
                None if is_installed("triton") else "triton is not installed; CUDA builds of torch bring it",
                "on a GPU; a CPU runs their torch references",
            ),
            _feature("kernels compiled for the CPU", _no_native(), "quantized weights stay quantized"),
            _feature("sweep --engine http", missing("http"), "installed"),
            _feature("Ray clusters", missing("ray"), "--distributed ray"),
            _feature("reasoning-gym tasks", missing("reasoning"), "installed"),
        ],
    }


def _no_native() -> str | None:
    from specbatch.kernels.common import native

    return native.missing()


def _support(what: str) -> dict[str, Any]:
    """Half of the support matrix: "families" or "settings"."""
    from specbatch.engine import support

    every = support.of_families() if what == "families" else support.of_settings()
    with progress(f"trying {what}", "combinations") as report:
        rows = []
        for item in every:
            rows.append(asdict(item) | {"runs": item.runs})
            report(len(rows), len(support.DRAFTS) * len(support.FAMILIES if what == "families" else support.SETTINGS))
    return {what: rows, "conflicts": [list(pair) for pair in support.CONFLICTS]}


def _environment_table(found: dict[str, Any]) -> str:
    from specbatch.records.markdown import markdown_table

    machine = found["hardware"]
    lines = {
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "system": f"{machine['system']} {machine['machine']}",
        "processor": f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory",
        "devices": ", ".join(device["name"] for device in found["devices"]),
        "cache": found["cache"],
    }
    return markdown_table(lines.items(), ["environment", "found"])


def _features_table(found: dict[str, Any]) -> str:
    from specbatch.records.markdown import markdown_table

    rows = [[row["feature"], "yes" if row["runs"] else "no", row["why"]] for row in found["features"]]
    return markdown_table(rows, ["feature", "runs", "why"])


def _support_tables(found: dict[str, Any]) -> str:
    matrices, notes = _matrices(found)
    conflicts = "; ".join(f"{one} with {other}" for one, other in found["conflicts"])
    *others, last = (name for name, entry in ALGORITHMS.items() if entry.has_trained_draft)
    needs = [f"{name} needs {entry.needs}" for name, entry in ALGORITHMS.items() if entry.needs and not entry.alias_of]
    needs.append(f"{', '.join(others)} and {last} need a draft that was trained for the target.")
    notes.append("; ".join(needs))
    notes.append(
        "Settings were tried with a target that has attention in all layers. A draft with recurrent layers (a draft "
        "model that has some, or self:skip of Qwen3-Next, Qwen3.5, Nemotron-H and LFM2) makes chains of a fixed number "
        "of tokens: without tree (--draft-topk) and --draft-tokens auto."
    )
    notes.append(f"Settings that run with a draft run together, except {conflicts}.")
    return "\n\n".join([*matrices, "\n".join(f"* {note}" for note in notes)])


# What is found, and shown, one after the other: the last two take seconds.
SECTIONS: tuple[tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], str]], ...] = (
    (_environment, _environment_table),
    (_features, _features_table),
    (lambda: _support("families") | _support("settings"), _support_tables),
)


def _matrices(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The support matrix: two tables in which numbers stand for reasons, and the reasons."""
    from specbatch.records.markdown import markdown_table

    reasons: dict[str, str] = {}
    tables = []
    for name, heading in (("families", "target"), ("settings", "setting")):
        cells: dict[str, dict[str, str]] = {}
        for item in found[name]:
            cells.setdefault(item["what"], {})[item["draft"]] = _cell(item["why"], reasons)
        headings = next(iter(cells.values()))
        tables.append(markdown_table([[what, *row.values()] for what, row in cells.items()], [heading, *headings]))
    named = {name: name for name in ENGINE_OPTIONS} | GRAPHS
    flags = {name: Flag(f"--{option.replace('_', '-')}", None, False, False) for name, option in named.items()}
    notes = [f"no ({number}): {in_text(text, flags)}" for number, text in enumerate(reasons.values(), start=1)]
    return tables, notes


def _cell(why: str, reasons: dict[str, str]) -> str:
    """ "yes", or the number of the reason. Reasons that differ in numbers alone are one."""
    if not why:
        return "yes"
    kind = re.sub(r"\d+", "#", why)
    reasons.setdefault(kind, why)
    return f"no ({list(reasons).index(kind) + 1})"


def _feature(name: str, obstacle: str | None, how: str = "") -> dict[str, Any]:
    return {"feature": name, "runs": obstacle is None, "why": how if obstacle is None else obstacle}


def _devices() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = [{"name": "cpu", "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": f"cuda:{index} ({torch.cuda.get_device_name(index)})",
                "free_gib": round(free / 2**30, 1),
                "memory_gib": round(total / 2**30, 1),
            }
        )
    return found


def _no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "torch was built for CUDA but sees no device; is there a driver (nvidia-smi)?"


def _no_bfloat16() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "no GPU; on a CPU --dtype bfloat16 works, but is slow without hardware support"
    return None if torch.cuda.is_bf16_supported() else "not supported by this GPU; use --dtype float16"


def _no_peers() -> str | None:
    import torch

    from specbatch.runtime.device import far_device

    count = torch.cuda.device_count()
    if count < 2:
        return f"needs two CUDA devices, and there {'is 1' if count == 1 else 'are none'}"
    return far_device(count) or None


def _no_hub() -> str | None:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set; only cached models and data load"
    try:
        socket.create_connection(HUB, timeout=3).close()
    except OSError as error:
        return f"cannot connect to {HUB[0]} ({error}); known models and local files work"
    return None
