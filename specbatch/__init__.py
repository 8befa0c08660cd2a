"""specbatch: offline batch inference and evaluation for speculative decoding."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.version import __version__

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():  # a source tree: kernels/, evals/ and sweeps/ lie beside this folder
    __path__.append(str(_checkout))

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig, Graphs
    from specbatch.config.job_size import JobSize
    from specbatch.config.speculation import Speculation
    from specbatch.core.completion import Completion
    from specbatch.core.embedded_prompt import EmbeddedPrompt
    from specbatch.core.sampling_params import SamplingParams
    from specbatch.engine.engine import Engine
    from specbatch.engine.requests.open_requests import StreamEvent
    from specbatch.engine.scoring import Likelihood
    from specbatch.errors import SpecbatchError
    from specbatch.jobs.frames import RunFrames, load_run
    from specbatch.replicas.engine import DataParallelEngine

# Names resolve on first use, so that `import specbatch` (and `specbatch --help`) does not import torch.
_HOME = {
    "Completion": "specbatch.core.completion",
    "DataParallelEngine": "specbatch.replicas.engine",
    "EmbeddedPrompt": "specbatch.core.embedded_prompt",
    "Engine": "specbatch.engine.engine",
    "EngineConfig": "specbatch.config.engine_config",
    "Graphs": "specbatch.config.engine_config",
    "JobSize": "specbatch.config.job_size",
    "Likelihood": "specbatch.engine.scoring",
    "RunFrames": "specbatch.jobs.frames",
    "SamplingParams": "specbatch.core.sampling_params",
    "SpecbatchError": "specbatch.errors",
    "Speculation": "specbatch.config.speculation",
    "StreamEvent": "specbatch.engine.requests.open_requests",
    "load_run": "specbatch.jobs.frames",
}

__all__ = [
    "Completion",
    "DataParallelEngine",
    "EmbeddedPrompt",
    "Engine",
    "EngineConfig",
    "Graphs",
    "JobSize",
    "Likelihood",
    "RunFrames",
    "SamplingParams",
    "SpecbatchError",
    "Speculation",
    "StreamEvent",
    "__version__",
    "load_run",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'specbatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
