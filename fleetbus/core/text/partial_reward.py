"""Reads the part of a task that was done from what its verifier printed, if the verdict is 0. Pure.

The forms are those of Fleet's verifiers: lines ``App <name>: <0|1>`` for tasks over several applications, otherwise two literal
lists between marks, of what was right and of what was wrong.
"""

import ast
import re

_APP = re.compile(r"^\s*App\s+(?P<name>[^:\n]+):\s*(?P<passed>[01])\b(?P<rest>.*)$", re.MULTILINE)
_TRIVIAL = re.compile(r"no (?:unexpected|expected) changes|trivial", re.IGNORECASE)
_MARKED = r">>> {name} >>>\s*(?P<body>.*?)\s*<<< {name} <<<"
_RIGHT = re.compile(_MARKED.format(name="SUCCESS_ACCUMULATOR"), re.DOTALL)
_WRONG = re.compile(_MARKED.format(name="ERROR_ACCUMULATOR"), re.DOTALL)


def partial_reward(output: str) -> float | None:
    """The share of the task that was done, in [0, 1]; None if the output does not say.

    Applications that passed because nothing was to be done there count neither way.
    """
    apps = list(_APP.finditer(output))
    if apps:
        counted = [app for app in apps if not (app["passed"] == "1" and _TRIVIAL.search(app["rest"]))]
        return sum(app["passed"] == "1" for app in counted) / len(counted) if counted else None
    right, wrong = _count(_RIGHT, output), _count(_WRONG, output)
    if right is None and wrong is None:
        return None
    total = (right or 0) + (wrong or 0)
    return (right or 0) / total if total else None


def _count(pattern: re.Pattern[str], output: str) -> int | None:
    """The length of the literal list between the marks; None if there is none."""
    found = pattern.search(output)
    if found is None:
        return None
    try:
        value = ast.literal_eval(found["body"])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return len(value) if isinstance(value, list) else None
