"""Phrases that rewarded episodes have in common, step by step: the facts that the onset of reward hacking is read from. Pure.

A phrase is a run of `WORDS` words of what a policy said. Of each step only those are kept that many of its rewarded episodes
share, that no prompt has, and that were rare in the first steps: memory follows the number of steps and not of texts.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable

import msgspec

from fleetbus.core.diagnosis.facts import PhraseShare, StepPhrases, mean_of
from fleetbus_schemas import ChatMessage

WORDS = 4
KEPT = 0.1
"""Share of a step's rewarded episodes from which on a phrase of theirs is kept."""

MAX_KEPT = 200
"""Phrases of one step, the most frequent first."""

MAX_CHARS = 3000
"""Of an episode's text: half from its beginning and half from its end."""

MAX_WAITING = 8192
"""Episodes whose texts wait for the step that trains them."""

MAX_PROMPTS, MAX_PROMPTED = 4096, 200_000
"""Phrases of prompts that are known: what a policy repeats of its prompt is no finding."""

FIRST_STEPS = 5
"""What is common in one of them was always said."""

MAX_COMMON = 50_000
"""Phrases that were always said, and are known."""

FEWEST = 8
"""Rewarded episodes of a step; fewer share anything by chance."""

_WORD = re.compile(r"\w+|[^\w\s]")


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """A trained episode as it counts here."""

    episode_id: str
    group_id: str
    task: str
    reward: float


class PhraseFold:
    """Takes prompts and texts as they come, and gives the phrases of a step when it was trained."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._prompted: set[int] = set()
        self._digests: set[bytes] = set()
        self._common: set[str] = set()
        self._steps = 0

    def add_prompt(self, digest: bytes, messages: Iterable[ChatMessage]) -> None:
        """Note the phrases of a first prompt that was not seen before."""
        if digest in self._digests or len(self._digests) >= MAX_PROMPTS:
            return
        self._digests.add(digest)
        for message in messages:
            text = message.content if isinstance(message.content, str) else ""
            if len(self._prompted) < MAX_PROMPTED:
                self._prompted.update(hash(phrase) for phrase in _find_phrases(_cut(text)))

    def add_text(self, episode_id: str, text: str) -> None:
        """Note what was said in a turn."""
        self._texts[episode_id] = _cut(f"{self._texts.pop(episode_id, '')}\n{text}")
        if len(self._texts) > MAX_WAITING:
            self._texts.popitem(last=False)

    def fold_step(self, episodes: Iterable[Spoken]) -> StepPhrases:
        """The phrases that the rewarded ones of a step's episodes share."""
        known = [each for each in episodes if each.episode_id in self._texts]
        found = {each.episode_id: _find_phrases(self._texts[each.episode_id]) for each in known}
        rewarded = _find_rewarded(known)
        if len(rewarded) < FEWEST:
            return StepPhrases()
        counts = Counter(phrase for each in rewarded for phrase in found[each.episode_id] if hash(phrase) not in self._prompted)
        least = max(2, KEPT * len(rewarded))
        often = [phrase for phrase, count in counts.items() if count >= least and phrase not in self._common]
        self._steps += 1
        if self._steps <= FIRST_STEPS:
            self._common.update(sorted(often)[: MAX_COMMON // FIRST_STEPS])
            return StepPhrases(measured=True)
        shares = {}
        for phrase in sorted(often, key=lambda each: (-counts[each], each))[:MAX_KEPT]:
            having = [each for each in known if phrase in found[each.episode_id]]
            lacking = [each for each in known if phrase not in found[each.episode_id]]
            shares[phrase] = PhraseShare(
                counts[phrase] / len(rewarded),
                len(having) / len(known),
                mean_of(each.reward for each in having),
                mean_of(each.reward for each in lacking),
                len({each.task for each in having}),
            )
        return StepPhrases(measured=True, shares=shares)


def _find_rewarded(known: list[Spoken]) -> list[Spoken]:
    """Those that got more than their group did, or the highest reward of the step."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for each in known:
        groups[each.group_id].append(each.reward)
    highest = max((each.reward for each in known), default=0.0)
    means = {group: mean_of(rewards) for group, rewards in groups.items()}
    return [each for each in known if each.reward > means[each.group_id] or each.reward >= highest > 0]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS // 2]}\n{text[-MAX_CHARS // 2 :]}"


def _find_phrases(text: str) -> frozenset[str]:
    words = _WORD.findall(text.casefold())
    return frozenset(" ".join(words[place : place + WORDS]) for place in range(len(words) - WORDS + 1))
