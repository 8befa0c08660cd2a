"""Writes conversations of an agent that reads the source files of a package, as JSONL for `specbatch sweep --replay`.

    python docs/grids/agent_replay.py FOLDER --conversations 24 --turns 8 --out replay.jsonl

Each folder in FOLDER with enough files becomes one conversation. The user asks for an overview of the package; the
assistant lists the folder and reads one file per turn with tool calls; the results are the real listing and contents.
The messages of the assistant are written by this script, not by a model: what is measured are the answers of the model
after real contents that grow with every turn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 6000  # of a file, as agents cut long results
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name, description in (("list_files", "List the files of a folder."), ("read_file", "Read a text file."))
]
SYSTEM = "You explore source code with tools. Describe what you have read in two sentences before you read on."
Message = dict[str, Any]


def call(number: int, name: str, path: str) -> list[Message]:
    return [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"path": path})},
        }
    ]


def conversation(package: Path, turns: int) -> list[Message] | None:
    """None for a package with too few files."""
    sources = (path for path in sorted(package.rglob("*.py")) if path.is_file())
    files = [path for path in sources if 400 < path.stat().st_size < 200_000][: turns - 2]
    if len(files) < turns - 2:
        return None
    listing = "\n".join(f"{path.relative_to(package)}  {path.stat().st_size} bytes" for path in files)
    found: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"What does the package {package.name} do, and how is it organized?"},
        {"role": "assistant", "content": "I list its files first.", "tool_calls": call(0, "list_files", package.name)},
        {"role": "tool", "tool_call_id": "call_0", "content": listing},
    ]
    for number, path in enumerate(files, start=1):
        text = path.read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS]
        name = str(path.relative_to(package))
        lines = text.count("\n")
        said = f"Next is {name}."
        found += [
            {"role": "assistant", "content": said, "tool_calls": call(number, "read_file", name)},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{name}, {lines} lines:\n{text}"},
        ]
    return [*found, {"role": "assistant", "content": "I have read enough to answer."}]


def as_text(messages: list[Message]) -> list[Message]:
    """Calls as the assistant's text, and results as the user's."""
    found = []
    for message in messages:
        calls = "".join(
            f"\n{one['function']['name']} {one['function']['arguments']}" for one in message.get("tool_calls", ())
        )
        role = "user" if message["role"] == "tool" else message["role"]
        found.append({"role": role, "content": message["content"] + calls})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--text", action="store_true", help="calls and results as plain text, for templates without tools"
    )
    parser.add_argument("--out", type=Path, default=Path("replay.jsonl"))
    given = parser.parse_args()
    if given.turns < 3:
        parser.error(f"--turns={given.turns}: must be at least 3: a listing, a file and an answer")
    if given.conversations < 1:
        parser.error(f"--conversations={given.conversations}: must be at least 1")
    if not given.folder.is_dir():
        parser.error(f"FOLDER={str(given.folder)!r}: no such folder")
    packages = (
        path for path in sorted(given.folder.iterdir()) if path.is_dir() and not path.name.startswith((".", "_"))
    )
    rows = [
        {"id": package.name, "messages": as_text(messages)}
        if given.text
        else {"id": package.name, "messages": messages, "tools": TOOLS}
        for package in packages
        if (messages := conversation(package, given.turns))
    ][: given.conversations]
    if not rows:
        parser.error(f"no folder in {given.folder} has {given.turns - 2} Python files; use fewer --turns")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{given.out}: {len(rows)} conversations of {given.turns} turns: {', '.join(row['id'] for row in rows)}")


if __name__ == "__main__":
    main()
