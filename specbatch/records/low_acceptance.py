"""Warns when the first draft is hardly ever accepted, and names the likely causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import Completion

LOW_SHARE = 0.2  # of the first drafts accepted
MIN_VERIFIES = 200  # with a draft, before a warning

Diagnose = Callable[[Sequence[Completion]], str | None]


class LowAcceptanceWarning:
    """Logs one warning as soon as acceptance is clearly low, and a diagnosis of the requests when the run ends."""

    def __init__(self, causes: str, log: Callable[[str], None], diagnose: Diagnose | None = None) -> None:
        """causes: see `specbatch.algorithms.causes_of_low_acceptance`; diagnose: see `Drafter`."""
        self._causes = causes
        self._log = log
        self._diagnose = diagnose
        self._warned = False
        self._drafted = self._accepted = 0

    def add(self, counts: Acceptance) -> None:
        """Count a finished request."""
        drafted, accepted = counts.first
        self._drafted += drafted
        self._accepted += accepted
        if self._warned or not is_low(self._drafted, self._accepted):
            return
        share = f"{self._accepted / self._drafted:.1%} of {self._drafted}"
        self._log(f"low acceptance: {share} first drafts were accepted\n  likely causes: {self._causes}")
        self._warned = True

    def finish(self, completions: Sequence[Completion]) -> None:
        """Diagnose once, after a run, with nothing in flight."""
        if self._warned and self._diagnose is not None:
            diagnose, self._diagnose = self._diagnose, None
            found = diagnose(completions)
            if found is not None:
                self._log(f"  {found}")


def is_low(drafted: int, accepted: int) -> bool:
    """Whether so many verifies with a draft, and so many accepted first drafts, deserve a warning."""
    return drafted >= MIN_VERIFIES and accepted < LOW_SHARE * drafted
