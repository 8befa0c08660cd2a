"""Options and the summary of the fuzz tests. `make fuzz` runs many rounds, the quick suite a few of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from fuzzing import Fuzz

SHARDS = 16  # of a long run, for several processes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fuzz" in metafunc.fixturenames:
        long = metafunc.config.getoption("fuzz") is not None and metafunc.config.getoption("fuzz_seed") is None
        metafunc.parametrize("fuzz", range(SHARDS if long else 1), indirect=True, ids=lambda shard: f"shard{shard}")


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Iterator[Fuzz]:
    option = request.config.getoption
    found = Fuzz(option("fuzz"), request.param, SHARDS, option("fuzz_seed"))
    yield found
    request.node.user_properties.append(("fuzz", (request.node.originalname, dict(found.counts))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    found = getattr(item, "funcargs", {}).get("fuzz")
    if report.failed and found is not None:  # type: ignore[attr-defined]
        report.sections.append(("fuzz", f"repeat it: pytest {item.nodeid.split('[')[0]} --fuzz-seed {found.seed}"))  # type: ignore[attr-defined]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [item for items in terminalreporter.stats.values() for item in items if hasattr(item, "user_properties")]
    totals: dict[str, Counter[str]] = {}
    for report in reports:
        for kind, value in report.user_properties if getattr(report, "when", "") == "teardown" else ():
            if kind == "fuzz":
                totals.setdefault(value[0], Counter()).update(value[1])
    if totals and config.getoption("fuzz") is not None:
        terminalreporter.section("fuzz")
        for name, counts in sorted(totals.items()):
            terminalreporter.write_line(f"{name}: {', '.join(f'{count} {what}' for what, count in counts.items())}")
