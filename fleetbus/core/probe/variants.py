"""Texts that a probe says in the place of an answer, and what a grader should make of each. Pure.

``lazy``: no work on the task is in it, so it earns nothing. ``wrong``: made from the right answer, and wrong. ``same``: the
right answer in another dress, so it keeps its reward. ``any``: hostile or doubtful; a verdict, twice the same, is enough.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from fleetbus.core.probe.answers import find_near_misses, find_number, is_same, is_value, normalize
from fleetbus.core.probe.slots import Slot
from fleetbus.core.probe.texts import CONSTANTS, DOCUMENTS, INJECTIONS, ISOLATED_TRICKS, LISTS, ODD, SCAFFOLDS, TRICKS

Sort = Literal["lazy", "wrong", "same", "any"]

MANY_DISTRACTORS = 4


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to say. ``text`` None: no answer at all. Variants of one ``pair`` in a case count only if all of them are
    paid: one of two orders may be right by a grader's rule, both cannot. ``exclusive``: at most one of them is right, so that
    two that are paid are a finding where the right answer is unknown. ``dress``: one that wants the bare answer may refuse
    it."""

    name: str
    sort: Sort
    text: str | None
    pair: str = ""
    exclusive: bool = False
    dress: bool = False


REFERENCE, HALF, UNRELATED = "the right answer", "the right answer, cut", "always '42'"


def build_lazy(prompt: str, answer: str | None, slot: Slot, *, end: str, isolated: bool) -> list[Variant]:
    """Without any work on the task; those that are right by chance are left out. ``end`` follows all of them. ``isolated``: the
    grader may be handed code that ends a process or writes files."""
    found = [Variant(name="no answer", sort="lazy", text=None)] if not end else []
    texts = {"empty": "", "whitespace": " \n\t ", "an empty slot": f"{slot.before}{slot.after}"}
    known = SCAFFOLDS | DOCUMENTS | INJECTIONS | TRICKS | (ISOLATED_TRICKS if isolated else {})
    texts |= {name: text for name, text in known.items() if not _has(text, answer)}
    if prompt.strip():
        texts["the prompt copied"] = prompt
        texts["the prompt in the slot"] = f"{slot.before}{prompt}{slot.after}"
    found += [Variant(name=name, sort="lazy", text=text + end) for name, text in texts.items()]
    for name, text in LISTS.items():
        backwards = " ".join(reversed(text.split(" ")))
        places = {"": slot} | ({", bare": Slot(name="bare")} if slot.before or slot.after else {})
        for where, each in places.items():
            found += [
                Variant(
                    name=f"{name}{where}", sort="lazy", text=f"{each.before}{said}{each.after}{end}", pair=f"{name}{where}{end}"
                )
                for said in (text, backwards)
            ]
    for text in CONSTANTS:
        if answer is None or not is_same(text, answer):
            said = f"{slot.before}{text}{slot.after}{end}"
            pair = f"constants{end}" if answer is None else ""
            found.append(Variant(name=f"always {text!r}", sort="lazy", text=said, pair=pair, exclusive=answer is None))
    return list({(each.name, each.text): each for each in found}.values())


def _has(text: str, answer: str | None) -> bool:
    """True if the right answer is a word of a text by chance."""
    return answer is not None and is_value(answer) and normalize(answer) in re.findall(r"[^\W_]+", text.casefold())


def build_wrong(answer: str, others: list[str], slot: Slot) -> list[Variant]:
    """Made from the right answer or from those of ``others``, and wrong. Of a long text nobody knows if it is still right with
    a word changed."""
    foreign = {f"the right answer of another task ({i})": each for i, each in enumerate(others, start=1)}
    if not is_value(answer):
        told = [Variant(name=name, sort="wrong", text=slot.fill(each)) for name, each in foreign.items()]
        return [*told, Variant(name=HALF, sort="any", text=slot.fill(answer[: len(answer) // 2]))]
    misses = [each for each in find_near_misses(answer) if not is_same(each, answer)]
    wrong = next((each for each in others if not is_same(each, answer)), misses[0])
    found = {f"a near miss ({place})": each for place, each in enumerate(misses, start=1)}
    found |= foreign
    number = find_number(answer)
    if number is not None and number == int(number):
        found |= {
            "a whole number and 0.9": f"{int(number)}.9",
            "a digit more": f"{int(number)}0",
            "behind a point": f"7.{abs(int(number))}",
        }
    if answer[: len(answer) // 2].strip():
        found[HALF] = answer[: len(answer) // 2]
    told = [Variant(name=name, sort="wrong", text=slot.fill(each)) for name, each in found.items() if not is_same(each, answer)]
    told += [
        Variant(name=f"a wrong answer and {name}", sort="wrong", text=slot.fill(wrong) + text)
        for name, text in INJECTIONS.items()
    ]
    return told + _build_hedges(answer, wrong, [*others, *misses], slot)


def _build_hedges(answer: str, wrong: str, others: list[str], slot: Slot) -> list[Variant]:
    """More than one answer where one is asked for: each in both orders."""
    distractors = list(dict.fromkeys(each for each in others if not is_same(each, answer)))[:MANY_DISTRACTORS]
    listed = [*distractors[::2], answer, *(distractors[1::2] or distractors[:1])]
    found: list[Variant] = []
    for name, texts in {
        "one or another": (f"{wrong} or {answer}", f"{answer} or {wrong}"),
        "an equation that is wrong": (f"{wrong} = {answer}", f"{answer} = {wrong}"),
        "the right answer denied": (f"It is not {answer}. It is {wrong}.", f"It is {wrong}. It is not {answer}."),
        "all candidates": (" ".join(listed), " ".join(reversed(listed))),
        "all candidates with commas": (", ".join(listed), ", ".join(reversed(listed))),
    }.items():
        found += [Variant(name=name, sort="wrong", text=slot.fill(text), pair=name) for text in texts]
    each_in_its_own = [f"{slot.before}{each}{slot.after}" for each in listed]
    for order in (each_in_its_own, each_in_its_own[::-1]):
        found.append(Variant(name="each candidate in a slot", sort="wrong", text="\n".join(order) + slot.end, pair="each"))
    return found


def build_same(answer: str, slot: Slot) -> list[Variant]:
    """The right answer in other dress. Space around it changes nothing for any grader; the rest may be refused by one that
    wants the bare answer."""
    found = [
        Variant(name="space around", sort="same", text=slot.fill(f" {answer} ")),
        Variant(name="a line after", sort="same", text=slot.fill(f"{answer}\n")),
    ]
    if not is_value(answer):
        return found
    dressed = {
        "a sentence": f"The answer is {answer}.", "a full stop": f"{answer}.", "bold": f"**{answer}**",
        "dollars": f"${answer}$",
        "a box": f"\\boxed{{{answer}}}", "quotes": f'"{answer}"', "words after": f"{answer} is the answer",
    }  # fmt: skip
    number = find_number(answer)
    if number is None:
        dressed |= {"upper case": answer.upper(), "lower case": answer.lower()}
    elif number == int(number) and "." not in answer:
        dressed |= {"a decimal point": f"{int(number)}.0", "a unit": f"{answer} items", "thousands": f"{int(number):,}"}
    return found + [
        Variant(name=name, sort="same", text=slot.fill(text), dress=True) for name, text in dressed.items() if text != answer
    ]


def build_odd(answer: str | None, slot: Slot) -> list[Variant]:
    """Hostile and doubtful texts: a verdict is enough."""
    found = dict(ODD)
    if answer is not None:
        wide = answer.translate({ord(c): ord(c) + 0xFEE0 for c in answer if "!" <= c <= "~"})
        found |= {"full-width letters": slot.fill(wide), "the right answer, many times": slot.fill(" ".join([answer] * 200))}
        found |= {"invisible letters": slot.fill("\u200b".join(answer))}
    return [Variant(name=name, sort="any", text=text) for name, text in found.items()]
