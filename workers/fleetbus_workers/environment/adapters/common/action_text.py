"""Makes a policy's text an action of a text world: what stands between its marks, without the thinking before it.

Pure.
"""

import re

_THOUGHT = re.compile(r"^.*</think>", re.DOTALL | re.IGNORECASE)
_MARKED = re.compile(r"<(action|answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def extract_action(text: str) -> str:
    """The last ``<action>`` or ``<answer>`` of ``text``, else all of it after the thinking; without surrounding space."""
    answer = _THOUGHT.sub("", text)
    marked = [match.group(2) for match in _MARKED.finditer(answer)]
    return (marked[-1] if marked else answer).strip()
