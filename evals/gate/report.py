"""The verdict of a gate as Markdown for pull requests and as JUnit XML for CI."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from specbatch.errors import counted
from specbatch.evals.gate.checks import Check
from specbatch.evals.gate.gate import GateResult
from specbatch.files.atomic_file import write_atomic, write_json
from specbatch.records.markdown import markdown_table

NAMED = 20  # lost or gained questions to list
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def markdown(result: GateResult) -> str:
    """A title, a table of the checks, and the accuracy tests with the drop that they can detect."""
    every = counted(len(result.checks), "check")
    title = f"passed ({every})"
    if result.failed:
        title = f"FAILED ({len(result.failed)} of {every})"
    elif result.undecided:
        title = f"no verdict ({len(result.undecided)} of {every} undecided)"
    against = "" if result.baseline is None else f" Baseline: `{result.baseline}`."
    points = any(check.point for check in result.checks)
    headers = [*(["point"] if points else []), "check", "run", "allowed", "baseline", "verdict"]
    body = [_cells(check, points) for check in result.checks]
    parts = [
        f"## specbatch gate: {title}",
        f"Run: `{result.run}`.{against} Policy: `{result.policy}`.",
        markdown_table(body, headers),
    ]
    for test in result.tests:
        parts.append(f"Accuracy{f' at {test.point}' if test.point else ''}: {test.text}")
        parts += [
            f"Questions {name}: {', '.join(map(str, found[:NAMED]))}{' ...' if len(found) > NAMED else ''}"
            for name, found in (("lost", test.lost), ("gained", test.gained))
            if found
        ]
    parts += [
        f"{check.name}{f' at {check.point}' if check.point else ''}: {check.detail}"
        for check in (*result.failed, *result.undecided)
        if check.detail and check.detail not in _printed(result)
    ]
    return "\n\n".join(parts) + "\n"


def junit(result: GateResult) -> str:
    """One test case per check; a failed one, or an undecided one as an error, holds the value found and what is
    allowed."""
    failures, errors = len(result.failed), len(result.undecided)
    counts = {"tests": str(len(result.checks)), "failures": str(failures), "errors": str(errors)}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "specbatch gate", **counts, "skipped": "0"})
    for check in result.checks:
        place = f"specbatch.gate.{check.point}" if check.point else "specbatch.gate"
        case = ElementTree.SubElement(suite, "testcase", {"classname": _clean(place), "name": _clean(check.name)})
        if not check.passed:
            message = f"{check.found}; allowed: {check.allowed}; baseline: {check.baseline}"
            kind = "failure" if check.passed is False else "error"
            failure = ElementTree.SubElement(case, kind, {"message": _clean(message)})
            failure.text = _clean(check.detail) or None
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def save(result: GateResult, folder: Path) -> None:
    """Write summary.md, junit.xml and gate.json into an existing folder."""
    write_atomic(folder / "summary.md", markdown(result))
    write_atomic(folder / "junit.xml", junit(result))
    write_json(folder / "gate.json", result.as_dict())


def _cells(check: Check, points: bool) -> list[str]:
    cells = [check.name, check.found, check.allowed, check.baseline, check.verdict]
    return [cell.replace("|", "\\|") for cell in ([check.point, *cells] if points else cells)]


def _printed(result: GateResult) -> set[str]:
    return {test.text for test in result.tests}


def _clean(text: str) -> str:
    """The text without characters that XML does not allow."""
    return _NO_XML.sub("?", text)
