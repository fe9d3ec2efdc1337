"""Subjects with wildcards, as NATS reads them: ``*`` is one token, a final ``>`` is one or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Matcher = Callable[[str], bool]

T = TypeVar("T")


def is_literal(pattern: str) -> bool:
    """True if the pattern has no wildcard token, and so is one subject."""
    return not {"*", ">"} & set(pattern.split("."))


def matcher(pattern: str) -> Matcher:
    """A test for subjects; the common shapes (literal, literal tokens and a final ``>``) are one string comparison."""
    if is_literal(pattern):
        return pattern.__eq__
    tokens = pattern.split(".")
    if tokens[-1] == ">":
        head = tokens[:-1]
        if is_literal(".".join(head)):
            prefix = pattern[:-1]
            return lambda subject: subject.startswith(prefix) and len(subject) > len(prefix)
        return lambda subject: _matches_head(head, subject.split("."))
    return lambda subject: _matches(tokens, subject.split("."))


def any_matcher(patterns: Sequence[str]) -> Matcher:
    """A test for subjects that match at least one pattern; no pattern at all matches everything."""
    if not patterns:
        return lambda subject: True
    matchers = [matcher(pattern) for pattern in patterns]
    if len(matchers) == 1:
        return matchers[0]
    return lambda subject: any(each(subject) for each in matchers)


class SubjectIndex(Generic[T]):
    """Values by pattern: those that match a subject are found without looking at every pattern."""

    def __init__(self) -> None:
        self._count = 0
        self._by_text: dict[str, dict[object, tuple[int, T]]] = {}
        self._others: dict[object, tuple[int, T, Matcher]] = {}

    def add(self, pattern: str, key: object, value: T) -> None:
        """Put ``value`` under ``pattern``; ``key`` is what `remove` knows it by."""
        self._count += 1
        if _is_indexable(pattern):
            self._by_text.setdefault(pattern, {})[key] = (self._count, value)
        else:
            self._others[key] = (self._count, value, matcher(pattern))

    def remove(self, pattern: str, key: object) -> None:
        if not _is_indexable(pattern):
            del self._others[key]
            return
        del self._by_text[pattern][key]
        if not self._by_text[pattern]:
            del self._by_text[pattern]

    def find(self, subject: str) -> list[T]:
        """The values whose pattern matches, in the order in which they were added."""
        found = [*self._by_text.get(subject, {}).values()]
        end = subject.rfind(".")
        while end > 0:
            found += self._by_text.get(subject[: end + 1] + ">", {}).values()
            end = subject.rfind(".", 0, end)
        found += [(number, value) for number, value, matches in self._others.values() if matches(subject)]
        found.sort(key=lambda numbered: numbered[0])
        return [value for _, value in found]


def _is_indexable(pattern: str) -> bool:
    return is_literal(pattern.removesuffix(".>"))


def _matches(tokens: list[str], subject: list[str]) -> bool:
    return len(tokens) == len(subject) and all(token in ("*", word) for token, word in zip(tokens, subject, strict=True))


def _matches_head(head: list[str], subject: list[str]) -> bool:
    return len(subject) > len(head) and _matches(head, subject[: len(head)])
