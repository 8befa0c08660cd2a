"""How many requests an engine will get and how long they are, as far as it is known before it is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbatch.config.settings import check_fields, number, setting, whole


@dataclass(frozen=True)
class JobSize:
    """What is known of a job. Settings that are "auto" follow from it; requests that differ from it run all the same.

    requests       how many there are
    prompt_tokens  mean length of their prompts
    new_tokens     mean of the most tokens that they may generate
    shared_tokens  with which all prompts begin alike
    """

    requests: int | None = setting(None, rule=whole(1))
    prompt_tokens: float | None = setting(None, rule=number(lambda count: count > 0, "use a positive number"))
    new_tokens: float | None = setting(None, rule=number(lambda count: count > 0, "use a positive number"))
    shared_tokens: int = setting(0, rule=whole(0))

    def __post_init__(self) -> None:
        check_fields(self, "job.")

    def of_one(self, replicas: int) -> JobSize:
        """The job of one of so many replicas."""
        return self if self.requests is None else replace(self, requests=-(-self.requests // replicas))
