"""Writes persons.tsv from WordNet 3.0: a name, and what its gloss says, for everyone with two known years.

python extract.py /usr/share/wordnet/data.noun    # of Debian's package wordnet-base
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PERSONS, INSTANCE = "18", "@i"
LONGEST_WORDS = 25
LIFE = re.compile(r".*[^\d-]\(\d{4}-\d{4}\)")


def read_persons(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """By the shortest of their full names: definitions that end with the years of birth and death, the only ones in them."""
    for line in lines:
        head, _, gloss = line.partition(" | ")
        _, kind, _, count, *fields = head.split()
        names = [name.replace("_", " ") for name in fields[: 2 * int(count, 16) : 2] if "_" in name]
        said = gloss.partition('; "')[0].strip()
        one_life = LIFE.fullmatch(said) and len(re.findall(r"\d{3,}", said)) == 2
        if kind == PERSONS and INSTANCE in fields and names and one_life and len(said.split()) <= LONGEST_WORDS:
            yield min(names, key=lambda name: (name.count(" "), len(name))), said


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="ascii") as file:
        persons = dict(read_persons(line for line in file if not line.startswith("  ")))
    Path(__file__).with_name("persons.tsv").write_text("".join(f"{name}\t{said}\n" for name, said in sorted(persons.items())))
