"""Write docs/errors.md from the places in the source that raise: `python -m tests.errors_page`."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from vafl import errors

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"VFL-\d{4}")
PACKAGES = {
    1: "Configuration, names and files",
    2: "Data",
    3: "Models",
    4: "Protocol",
    5: "Privacy",
    6: "Transport and simulation",
    7: "Runs",
    8: "Reports, estimators and audits",
    9: "Commands",
}
_INTRO = """# Errors

Every error has a stable code, such as `VFL-1203`. The message names the rule that was broken, the value
that was found, and the remedy. Programs can match the code: the message starts with it, and in Python it is
`error.code`. In the tables, `{...}` stands for a value.

A command that fails ends with the exit code of its error: 2 for settings, 3 for data, 4 for a run that cannot
go on, 5 for run folders and ledgers, 6 for an audit that found a leak, 7 for another party's fault, 8 for a
file that cannot be read or written.

This page is made from the code (`python -m tests.errors_page`), and a test keeps it so.
"""


@dataclass(frozen=True)
class Raised:
    """One place that raises an error."""

    code: str
    kind: str
    text: str


def raised():
    """Return all places that raise an error with a code, in the order of the codes."""
    found = []
    for path in (ROOT / "src" / "vafl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            code = node.args[0].value
            if isinstance(code, str) and CODE.fullmatch(code):
                text = _text(node.args[1]) if len(node.args) > 1 else ""
                found.append(Raised(code, ast.unparse(node.func), text))
    return sorted(found, key=lambda each: each.code)


def errors_page():
    """Return the page."""
    parts = [_INTRO]
    for digit, title in PACKAGES.items():
        rows = [
            f"| {each.code} | {_exit_code(each.kind)} | {each.text} |"
            for each in raised()
            if each.code.startswith(f"VFL-{digit}")
        ]
        head = f"## {title}\n\n| code | exit code | message |\n|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _exit_code(kind):
    return getattr(getattr(errors, kind, None), "exit_code", "")


def _text(node):
    """Return a message as it is in the source, with {name} for each value."""
    if isinstance(node, ast.Constant):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{_name(part.value)}}}"
            for part in node.values
        )
    elif isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    else:
        text = f"{{{_name(node)}}}"
    return " ".join(text.split()).replace("|", "\\|")


def _name(node):
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return "..."


if __name__ == "__main__":
    (ROOT / "docs" / "errors.md").write_text(errors_page(), encoding="utf-8")
