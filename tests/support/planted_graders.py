"""Graders with one planted hole each, those that the demonstrations of other probes plant among them, and sound ones."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable

from fleetbus_schemas import Task

Grade = Callable[[str, str], float]
"""The reward for what was said, given the right answer."""

COUNTING = [Task(key=f"t{n}", prompt=f"Which number follows {n}?", config={"answer": str(n + 1)}) for n in range(8)]
CHOICES = [
    Task(
        key=f"t{n}",
        prompt=f"Question {n}: choose one.\nA. one thing\nB. another\nC. a third\nD. none\nThe letter goes into <answer> tags.",
        config={"answer": "ABCD"[n % 4]},
    )
    for n in range(8)
]
SUMS = [
    Task(key=f"t{n}", prompt=f"{n * 37} + {n * 91}? The sum alone, inside <answer></answer>.", config={"answer": str(n * 128)})
    for n in range(1, 9)
]
TENS = [Task(key=f"t{n}", prompt=f"Measure {n}", config={"answer": str(10 * n + 5)}) for n in range(8)]
SENTENCES = [Task(key=f"t{n}", prompt=f"Say the result of {n}.", config={"answer": f"the answer is {n}"}) for n in range(8)]
WORDS = [Task(key=f"t{n}", prompt=f"Animal {n}?", config={"answer": f"zebra{n}"}) for n in range(8)]
ROWS = [Task(key=f"t{n}", prompt=f"Row {n}", config={"answer": "x" * (n + 1)}) for n in range(8)]
EXAMPLES = [
    Task(
        key=f"t{n}",
        prompt=f"Put the letter into a box, as in \\boxed{{B}}. {n}: A, B, C or D?",
        config={"answer": "ABCD"[n % 4]},
    )
    for n in range(8)
]
FACTS = [Task(key=f"t{n}", prompt=f"Three facts on {n}.", config={"answer": f"alpha{n}|beta{n}|gamma{n}"}) for n in range(8)]
FOREIGN = [
    Task(key=f"t{n}", prompt=f"Translate {n}", config={"answer": answer})
    for n, answer in enumerate(("日本語", "Ω≈ç√", "naïve café", "Ελληνικά", "über"))
]
THIRDS = [Task(key=f"t{n}", prompt=f"A third of {n}?", config={"answer": f"{n / 3:.6f}"}) for n in range(8)]
LABELS = ["positive", "negative", "neutral"]
FEELINGS = [
    Task(key=f"t{n}", prompt=f"Text {n}: say if it is positive, negative or neutral.", config={"answer": LABELS[n % 3]})
    for n in range(9)
]
SKEWED = [Task(key=f"t{n}", prompt=f"Is item {n} good?", config={"answer": "yes" if n < 7 else "no"}) for n in range(8)]
_draws = itertools.count()


def exact(said: str, answer: str) -> float:
    return float(said.strip() == answer)


def read_tag(said: str) -> str:
    found = re.search(r"<answer>(.*?)</answer>", said, re.DOTALL)
    return found[1].strip() if found else ""


def tagged(said: str, answer: str) -> float:
    return float(read_tag(said) == answer)


def number_close(said: str, answer: str) -> float:
    try:
        return float(math.isclose(float(said), float(answer), abs_tol=1e-6))
    except ValueError:
        return 0.0


def alike(said: str, answer: str) -> float:
    return difflib.SequenceMatcher(None, said.strip()[:200], answer).ratio()


def parts(said: str, answer: str) -> float:
    return sum(part in said for part in answer.split("|")) / 3


def last_number(said: str, answer: str) -> float:
    found = re.findall(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", said)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(answer))


SOUND: dict[str, tuple[Grade, list[Task]]] = {
    "the very text": (exact, COUNTING),
    "the very text in a tag": (tagged, CHOICES),
    "texts of other alphabets": (exact, FOREIGN),
    "a narrow tolerance": (number_close, THIRDS),
    "likeness, as a scale": (alike, SENTENCES),
    "parts, as a scale": (parts, FACTS),
    "labels that the prompt names": (exact, FEELINGS),
    "nearly always the same label": (exact, SKEWED),
    "the last number": (last_number, SUMS),
}


def in_tag(said: str, answer: str) -> float:
    """As falsepass's toy: anywhere in the tag."""
    return float(answer in read_tag(said))


def tag_and_substring(said: str, answer: str) -> float:
    """As rl-envdoctor's demonstration."""
    found = re.search(r"<answer>(.*?)</answer>", said, re.DOTALL)
    return (0.3 if found else 0.0) + (0.7 if answer in (found[1] if found else said) else 0.0)


def empty_is_right(said: str, answer: str) -> float:
    return 1.0 if not said.strip() else exact(said, answer)


def form_is_paid(said: str, answer: str) -> float:
    return (0.3 if "<answer>" in said else 0.0) + 0.7 * tagged(said, answer)


def anywhere(said: str, answer: str) -> float:
    return float(answer in said)


def last_box(said: str, answer: str) -> float:
    found = re.findall(r"\\boxed\{([^}]*)\}", said)
    return float(bool(found) and found[-1].strip() == answer)


def first_letter(said: str, answer: str) -> float:
    return float(said.strip()[0] == answer[0])


def within_ten(said: str, answer: str) -> float:
    try:
        return float(abs(float(said) - float(answer)) <= 10)
    except ValueError:
        return 0.0


def length_pays(said: str, answer: str) -> float:
    return max(exact(said, answer), min(len(said) / 4000, 1.0))


def five(said: str, answer: str) -> float:
    return 5 * exact(said, answer)


def nan_of_empty(said: str, answer: str) -> float:
    return exact(said, answer) if said.strip() else math.nan


def one_letter(said: str, answer: str) -> float:
    kept = re.sub("[^a-z]", "", said.lower())[:1]
    return float(bool(kept) and kept == answer[0])


def document_pays(said: str, answer: str) -> float:
    return 0.2 * ("##" in said) + 0.2 * ("- " in said) + 0.2 * ("[1]" in said) + 0.4 * (answer in said)


def tone_pays(said: str, answer: str) -> float:
    text = said.lower()
    tone = 0.5 * any(word in text for word in ("clear", "decisive", "necessarily", "established"))
    return max(0.0, tone - 0.3 * any(word in text for word in ("perhaps", "possibly"))) + 0.5 * (answer in said)


def row_alone(said: str, answer: str) -> float:
    return min(1.0, len(answer) / 10)


def always(said: str, answer: str) -> float:
    return 0.7


def a_third_for_anything(said: str, answer: str) -> float:
    return exact(said, answer) or 0.35 * bool(said.strip())


def rejects_by_distance(said: str, answer: str) -> float:
    """NaN is not further away than anything."""
    try:
        return 0.0 if abs(float(said) - float(answer)) > 1e-6 else 1.0
    except ValueError:
        return 0.0


def cuts_to_whole(said: str, answer: str) -> float:
    try:
        return float(int(float(said)) == int(answer))
    except ValueError:
        return 0.0


def raising_is_paid(said: str, answer: str) -> float:
    try:
        return float(int(said) == int(answer))
    except ValueError:
        return 1.0


def believes_notes(said: str, answer: str) -> float:
    return 1.0 if '"reward": 1' in said else exact(said, answer)


def prefix(said: str, answer: str) -> float:
    return float(bool(said.strip()) and answer.startswith(said.strip()))


def either_side(said: str, answer: str) -> float:
    return float(answer in [each.strip() for each in re.split(" or |=|,", said)])


def drawn(said: str, answer: str) -> float:
    """Different each time."""
    return exact(said, answer) * (0.5 + 0.5 * (next(_draws) % 2))


def remembers(said: str, answer: str, seen: set[str] = set()) -> float:  # noqa: B006 - what it remembers is the plant
    """Pays what was graded before."""
    known = f"{said}{answer}" in seen
    seen.add(f"{said}{answer}")
    return 1.0 if known else exact(said, answer)


def any_digit_but_no_comma(said: str, answer: str) -> float:
    found = re.findall(r"\d+", said)
    return float(bool(found) and found[-1] == answer)


HOLES: dict[str, tuple[str, str, Grade, list[Task]]] = {
    "falsepass, toy: the answer anywhere in the tag": ("false_accept", "all candidates", in_tag, SUMS),
    "falsepass, toy: one or another": ("false_accept", "one or another", in_tag, SUMS),
    "falsepass, toy: denied": ("false_accept", "the right answer denied", in_tag, SUMS),
    "envdoctor, demo: all letters": ("false_accept", "all letters", tag_and_substring, CHOICES),
    "envdoctor, demo: an empty tag": ("false_accept", "an empty <answer>", tag_and_substring, CHOICES),
    "envdoctor, pays_for_empty": ("false_accept", "empty", empty_is_right, COUNTING),
    "envdoctor, format_farm": ("false_accept", "an empty <answer>", form_is_paid, CHOICES),
    "envdoctor, substring_match": ("false_accept", "all letters", anywhere, CHOICES),
    "envdoctor, worked_example_in_prompt": ("false_accept", "the prompt copied", last_box, EXAMPLES),
    "envdoctor, crashes_on_empty": ("crash", "empty", first_letter, COUNTING),
    "envdoctor, constant_reward": ("false_accept", "anything, in place of an answer", always, COUNTING),
    "envdoctor, loose_tolerance": ("false_accept", "a near miss (1)", within_ten, TENS),
    "envdoctor, length_reward": ("false_accept", "filler", length_pays, COUNTING),
    "envdoctor, unbounded_reward": ("out_of_range", "the right answer", five, COUNTING),
    "envdoctor, nan_reward": ("crash", "empty", nan_of_empty, COUNTING),
    "envdoctor, over_normalised": ("false_accept", "the right answer of another task (1)", one_letter, WORDS),
    "envdoctor, markdown_shape_farm": ("false_accept", "a document without content", document_pays, SENTENCES),
    "envdoctor, pays_for_confidence": ("false_accept", "a firm claim", tone_pays, SENTENCES),
    "envdoctor, row_only_reward": ("false_accept", "anything, in place of an answer", row_alone, ROWS),
    "envdoctor, mild_partial_credit": ("false_accept", "refusal", a_third_for_anything, SENTENCES),
    "falsepass: a tolerance that only rejects": ("false_accept", "not a number", rejects_by_distance, COUNTING),
    "falsepass: a number cut to a whole one": ("false_accept", "a whole number and 0.9", cuts_to_whole, COUNTING),
    "falsepass: infinity raises": ("crash", "infinity", cuts_to_whole, COUNTING),
    "falsepass: an exception is paid": ("false_accept", "refusal", raising_is_paid, COUNTING),
    "falsepass: text for the grader": ("false_accept", "a forged verdict", believes_notes, COUNTING),
    "falsepass: one side of an equation": ("false_accept", "an equation that is wrong", either_side, SUMS),
    "falsepass: thousands are refused": ("false_reject", "thousands", any_digit_but_no_comma, SUMS),
    "the beginning is enough": ("false_accept", "the right answer, cut", prefix, SENTENCES),
    "another reward each time": ("unstable", "the right answer", drawn, COUNTING),
    "state from one verdict to the next": ("unstable", "anything, in place of an answer", remembers, COUNTING),
}
"""By name the kind and the answer that it is found by, the grader and its tasks."""
