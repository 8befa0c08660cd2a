"""How a run was started: the command, the git revision of specbatch and the environment variables that matter.

Nothing secret is kept. Of variables only those of `VARIABLES` and `PREFIXES` are read, and of these none with a name
that speaks of a secret. Values of options with such names are hidden, as are user, password and query of URLs. The
arguments of a program that is not part of specbatch are not kept at all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "TRITON_", "SPECBATCH_")
HIDDEN = "***"
_SECRET = re.compile(r"(?i)(^|[-_])(key|secret|password|passwd|auth|authorization|header|headers|token|credentials?)$")
_SECRET_VARIABLE = re.compile(r"(?i)key|secret|passw|auth|token|credential")
_GIT_TIMEOUT_S = 10


def provenance() -> dict[str, Any]:
    """The fields `command` (arguments, [] for a program of the user), `git` (absent outside of a checkout) and
    `environment`."""
    main = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "")
    found: dict[str, Any] = {"command": command(sys.argv, main), "environment": environment(os.environ)}
    if (git := revision(Path(__file__).resolve().parents[2])) is not None:
        found["git"] = dict(git)
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of `variables` that may change a measurement, without secrets."""
    return {
        name: variables[name]
        for name in sorted(variables)
        if (name in VARIABLES or name.startswith(PREFIXES)) and not _SECRET_VARIABLE.search(name)
    }


def command(arguments: Sequence[str], main: str) -> list[str]:
    """The command line of a process, if it is a command of specbatch. main: the module that runs, "" for a script."""
    module = main.removesuffix(".__main__")
    if module == "specbatch" or Path(arguments[0]).name == "specbatch":
        return ["specbatch", *without_secrets(arguments[1:])]
    if module.startswith("specbatch."):
        return ["python", "-m", module, *without_secrets(arguments[1:])]
    return []


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `HIDDEN` in place of values of options such as --api-key, and of passwords in URLs."""
    return list(_without_secrets(arguments))


def _without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    hide = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if hide and not argument.startswith("--"):
            yield HIDDEN
        elif equals and argument.startswith("--"):
            yield f"{name}={HIDDEN if _SECRET.search(name) else _public(value)}"
        else:
            yield _public(argument)
        hide = not equals and argument.startswith("--") and _SECRET.search(name) is not None


def _public(text: str) -> str:
    """A URL without user, password and query; any other text as it is."""
    if "://" not in text:
        return text
    try:
        url = urlsplit(text)
    except ValueError:
        return HIDDEN
    host = f"{HIDDEN}@{url.netloc.rpartition('@')[2]}" if "@" in url.netloc else url.netloc
    return url._replace(netloc=host, query=HIDDEN if url.query else "", fragment="").geturl()


@cache
def revision(checkout: Path) -> dict[str, Any] | None:
    """The git `revision` of specbatch in the folder `checkout`, and whether files of it were changed (`dirty`); without
    a repository there, that of the installation. None if unknown."""
    if (checkout / ".git").exists():
        commit, changes = _git(checkout, "rev-parse", "HEAD"), _git(checkout, "status", "--porcelain", "-uno")
        return None if commit is None or changes is None else {"revision": commit, "dirty": bool(changes)}
    try:
        return installed_revision(metadata.distribution("specbatch").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None


def installed_revision(direct_url: str) -> dict[str, Any] | None:
    """The same of an installation from a repository. direct_url: the file in which pip records it (PEP 610)."""
    try:
        commit = json.loads(direct_url).get("vcs_info", {}).get("commit_id")
    except ValueError:
        return None
    return None if commit is None else {"revision": str(commit), "dirty": False}


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
