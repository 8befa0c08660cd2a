"""Saves the state of a training as it runs, so that the same command continues after Ctrl-C or a crash."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from specbatch.errors import refuse
from specbatch.files.atomic_file import replacing
from specbatch.records.differences import describe_differences

FILE = "training.pt"
INTERVAL_S = 120.0  # of training between two saves: a crash loses at most that


@dataclass
class Training:
    """What changes as a head is trained. since: losses of the steps after the last evaluation."""

    head: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator
    history: Any  # trainer.History
    since: list[float] = field(default_factory=list)


class SavedState:
    """The file of a training in `folder`. settings: all that the training depends on; one with others is refused."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.path = folder / FILE
        self._settings = settings
        self._last = time.perf_counter()

    @property
    def is_due(self) -> bool:
        return time.perf_counter() - self._last >= INTERVAL_S

    def save(self, training: Training) -> None:
        state = {
            "settings": self._settings,
            "head": dict(training.head.named_parameters()),
            "optimizer": training.optimizer.state_dict(),
            "schedule": training.schedule.state_dict(),
            "generator": training.generator.get_state(),
            "history": asdict(training.history),
            "since": training.since,
        }
        with replacing(self.path) as part:
            torch.save(state, part)
        self._last = time.perf_counter()

    def restore(self, training: Training) -> dict[str, Any] | None:
        """Continue from the file, if there is one. Returns the history, whose `steps` batches are done."""
        if not self.path.exists():
            return None
        device = next(training.head.parameters()).device
        start_over = f"remove {self.path} to train from the start"
        try:
            state = torch.load(self.path, map_location=device, weights_only=True)
            settings = state["settings"]
        except (OSError, EOFError, KeyError, RuntimeError, TypeError, UnpicklingError) as error:
            works = f"is not the state of a training ({type(error).__name__}); {start_over}"
            raise refuse("output", str(self.path), works) from error
        if differs := [name for name in self._settings if settings.get(name) != self._settings[name]]:
            other = describe_differences(settings, self._settings, differs)
            works = f"is of a training with another {other}; use the same settings, or {start_over}"
            raise refuse("output", str(self.path), works)
        with torch.no_grad():
            for name, parameter in training.head.named_parameters():
                parameter.copy_(state["head"][name])
        training.optimizer.load_state_dict(state["optimizer"])
        training.schedule.load_state_dict(state["schedule"])
        training.generator.set_state(state["generator"].cpu())
        training.since = state["since"]
        history: dict[str, Any] = state["history"]
        return history

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
