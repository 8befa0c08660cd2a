"""Named shapes: the config.json values of published models, for random weights.

They are in shapes.json, with the published keys. "toy" and "nemotron-draft-0.3b" are our own: a model for tests and
first steps, and a draft model without recurrent layers with the vocabulary of Nemotron-H. The published files of
"moonlight-16b-a3b", in the layout of DeepSeek-V3, have no MTP layer; random weights may. Under "same" are models with
the shapes of an earlier one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DATA = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
SHAPES: dict[str, dict[str, Any]] = _DATA["shapes"]
SHAPES |= {name: SHAPES[earlier] for name, earlier in _DATA["same"].items()}
SUPPORT_MATRIX: dict[str, str] = _DATA["support_matrix"]  # families by title, each with the shape that stands for it
