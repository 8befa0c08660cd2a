"""Caps of an engine, and the line about its start."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from specbatch.config.speculation import Speculation
from specbatch.engine.setup.caps import start_up_line


def test_caps_of_an_engine(toy_engine: Callable[..., Any]) -> None:
    speculation = Speculation("ngram", draft_tokens=3)
    caps = toy_engine(speculation=speculation, prefix_cache=True, kv_pages=60, prefill_chunk=24).caps
    expected = {"device": "cpu", "dtype": "float32", "kv_dtype": "float32", "kv_scales": "none", "page_size": 4}
    expected |= {"max_running": 8, "max_model_len": 120, "kv_pages": 60, "prefill_chunk": 24, "verify_rows": 4}
    expected |= {"prefix_cache": "on", "deterministic": "off", "fp8_activations": "off"}
    assert {name: caps[name] for name in expected} == expected
    assert caps["kv_bytes"] == 60 * 4 * 3 * 2 * 2 * 8 * 4  # pages, tokens, layers, k and v, KV heads, channels, bytes
    assert "verify_budget" not in caps
    assert "corpus_tokens" not in caps


def test_a_draft_that_is_off_has_one_row(toy_engine: Callable[..., Any]) -> None:
    caps = toy_engine().caps
    assert (caps["verify_rows"], caps["verify_slots"], caps["draft_shape"]) == (1, 1, "none")


def test_the_start_up_line_has_the_parts_that_there_were() -> None:
    assert start_up_line({"load_s": 1.0}, 3.5) == "start-up: 3.5 s (load 1.0 s, other 2.5 s)"


def test_log_says_how_long_the_start_took(graph_engine: Callable[..., Any]) -> None:
    lines: list[str] = []
    caps = graph_engine(log=lines.append).caps
    [line] = [line for line in lines if line.startswith("start-up: ")]
    parts = r"load \d+\.\d s, compile \d+\.\d s, record \d+\.\d s, other \d+\.\d s"
    assert re.fullmatch(rf"start-up: \d+\.\d s \({parts}\)", line)
    assert min(caps[name] for name in ("load_s", "compile_s", "capture_s")) >= 0
