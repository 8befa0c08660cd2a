"""What the config.json of every draft of vllm-project/speculators has in common."""

from __future__ import annotations

from typing import Any

from specbatch.config.draft_shape import MOST
from specbatch.errors import refuse
from specbatch.files.config_values import count_of, table_of

_COUNT = "speculative_tokens"


def speculative_tokens(config: dict[str, Any]) -> int | None:
    """The number of drafts that a draft was published with; None if its config names none. It is that of the default
    proposal method of `speculators_config`, else of the first that has one, or stands at the top level."""
    table = table_of(config, "speculators_config")
    methods = table.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise refuse("proposal_methods", methods, "the config must list tables")
    default = table.get("default_proposal_method")
    ordered = sorted(methods, key=lambda method: method.get("proposal_type") != default)
    found = next((one for one in (*ordered, config) if one.get(_COUNT) is not None), None)
    return None if found is None else count_of(found, _COUNT, most=MOST)
