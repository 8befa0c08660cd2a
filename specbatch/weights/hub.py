"""Downloads from the model hub with `huggingface_hub` and its cache."""

from __future__ import annotations

from pathlib import Path

from specbatch.errors import refuse

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
TOKENIZER_FILES = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]


def snapshot(setting: str, name: str, patterns: list[str], *, works: str, local_dir: Path | None = None) -> Path:
    """Download the files of `owner/model` or `owner/model@revision` that match `patterns`, and return their folder.

    Files in the hub's cache are not downloaded again. `local_dir`: store the files there instead of in the cache. If
    the download fails, raises SpecbatchError for `setting`, with `works` as the advice.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        found = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=["consolidated*", "original/*"],
            local_dir=local_dir,
        )
    except Exception as error:  # errors of the hub, the network and the disk have no common class
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"it could not be downloaded from the model hub ({lines[0].rstrip('.')})"
        raise refuse(setting, name, f"{reason}; {works}") from None
    return Path(found)


def cached(name: str, file: str) -> Path | None:
    """The file of `owner/model` or `owner/model@revision` in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = name.partition("@")
    try:
        found = try_to_load_from_cache(repository, file, revision=revision or None)
    except ValueError:  # no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None
