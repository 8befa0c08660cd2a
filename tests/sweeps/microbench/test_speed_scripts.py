"""Scripts that time kernels say in one line that they need a device."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["accept", "attention", "moe", "gemm", "prefill", "recurrent"])
def test_without_a_device_they_end_with_a_line(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit) as ended:
        import_module(f"specbatch.sweeps.microbench.{name}").main()
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "error: needs a CUDA device and torch sees none here\n")
