"""The result of a request: what its `repr` shows."""

from __future__ import annotations

from specbatch.core.completion import Completion, RequestMetrics


def test_repr_is_short() -> None:
    metrics = RequestMetrics(itl_s=[0.0123456] * 400, emitted_histogram=[1, 2])
    done = Completion(0, [1] * 900, [4] * 400, "abc", "stop", metrics, logprobs=[-1.0] * 400)
    done.top_logprobs = [dict.fromkeys(range(20), -2.0)] * 400
    assert len(repr(done)) < 1500
    assert repr(metrics).startswith("RequestMetrics(prompt_tokens=0, ")
    assert "emitted_histogram=[1, 2], " in repr(metrics)
    assert "itl_s=[0.0123456, 0.0123456, 0.0123456, 0.0123456, 0.0123456, 0.0123456, ...]" in repr(done)
    assert "text='abc', finish_reason='stop'" in repr(done)
