"""Context management for the policy: outputs cut with a way back to the rest, search, pages, and a budget line. Pure.

Searching is for plain text, in any case, with ``|`` between alternatives: an expression of the policy's own could compute for
ever. Nothing here forgets: what is cut from an observation is kept whole and has a number.
"""

from collections.abc import Iterator, Sequence

LINE_CHARACTERS = 400
"""Longer lines are broken, so that pages are pages for every output of a tool."""

SUMMARY_REQUEST = (
    "[Your context is nearly full: earlier turns are about to be dropped. Do not act now. Write down all that you need to "
    "finish the task: what you found out, what you did, and what is left to do.]"
)
SUMMARY_KEPT = "[Earlier turns were dropped from your context; your summary of them stands above.]"

MAX_MATCHES = 10
SNIPPET_CHARACTERS = 200


def format_status_line(*, tokens: int, max_tokens: int, turn: int, max_turns: int) -> str:
    """The share of its budget that the policy has used, as the last line of an observation."""
    share = round(100 * tokens / max_tokens) if max_tokens else 100
    return f"[Context: {tokens:,}/{max_tokens:,} tokens ({share}%), Turn {turn}/{max_turns}]"


def truncate_output(text: str, limit: int, number: int) -> str:
    """The beginning of ``text`` and where the rest is, together at most ``limit`` characters; ``number`` names the output."""
    notice = (
        f"\n[TRUNCATED - {len(text)} chars total. This is output {number}: read on with view_tool_output, "
        "or look for something with search_tool_output.]"
    )
    return text[: max(0, limit - len(notice))] + notice


def read_page(text: str, *, page: int, page_size: int, limit: int) -> str:
    """Page ``page`` (from 1) of ``page_size`` lines, with line numbers, at most ``limit`` characters. Raises `ValueError` for a
    page that does not exist."""
    lines = list(number_lines(text))
    pages = max(1, -(-len(lines) // page_size))
    if not 1 <= page <= pages:
        raise ValueError(f"there is no page {page}: the output has {pages}")
    shown = lines[(page - 1) * page_size : page * page_size]
    head = f"[Page {page}/{pages}, {len(lines)} lines]"
    body = "\n".join(f"{number}: {line}" for number, line in shown)
    if len(head) + 1 + len(body) > limit:
        tail = "\n[This page is cut: ask for smaller ones.]"
        body = body[: max(0, limit - len(head) - 1 - len(tail))] + tail
    return f"{head}\n{body}"


def number_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines from 1 on, long ones broken."""
    number = 0
    for line in text.splitlines():
        for start in range(0, max(len(line), 1), LINE_CHARACTERS):
            number += 1
            yield number, line[start : start + LINE_CHARACTERS]


def search_lines(text: str, pattern: str) -> str:
    """The lines of ``text`` that contain the pattern, `MAX_MATCHES` at most."""
    words = _parse_pattern(pattern)
    found = [(number, line) for number, line in number_lines(text) if _contains(line, words)]
    return _format_matches(
        [f"{number}: {line[:SNIPPET_CHARACTERS]}" for number, line in found[:MAX_MATCHES]], len(found), "lines"
    )


def search_messages(messages: Sequence[tuple[str, str]], pattern: str) -> str:
    """The messages (role, text) that contain the pattern, the newest last, each with what stands around its first match."""
    words = _parse_pattern(pattern)
    found = [(index, role, _cut_snippet(text, words)) for index, (role, text) in enumerate(messages) if _contains(text, words)]
    shown = [f"message {index} ({role}): {snippet}" for index, role, snippet in found[-MAX_MATCHES:]]
    return _format_matches(shown, len(found), "messages")


def _parse_pattern(pattern: str) -> tuple[str, ...]:
    """The alternatives of a pattern. Raises `ValueError` when there is none."""
    words = tuple(word for part in pattern.split("|") if (word := part.strip().casefold()))
    if not words:
        raise ValueError("the pattern is empty")
    return words


def _contains(text: str, words: Sequence[str]) -> bool:
    folded = text.casefold()
    return any(word in folded for word in words)


def _cut_snippet(text: str, words: Sequence[str]) -> str:
    folded = text.casefold()
    position = min(place for word in words if (place := folded.find(word)) >= 0)
    start = max(0, position - SNIPPET_CHARACTERS // 4)
    return " ".join(text[start : start + SNIPPET_CHARACTERS].split())


def _format_matches(shown: Sequence[str], total: int, kind: str) -> str:
    if not total:
        return f"No {kind} match."
    head = f"Matching {kind}: {total}" + (f", {len(shown)} of them shown" if total > len(shown) else "")
    return "\n".join((head, *shown))
