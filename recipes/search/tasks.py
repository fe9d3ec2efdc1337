"""Questions for a year of a person's life, one for each person, so that the held-out ones are about other passages."""

import random
import re
from pathlib import Path

VERIFIER = "def verify(env, final_answer=None):\n    return float(str(final_answer).strip() == '{answer}')\n"
QUESTIONS = ("In which year was {name} born?", "In which year did {name} die?")
FOLDER = Path(__file__).parent


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("search")
    shown = (FOLDER / "examples.json").read_text()
    persons = [line.split("\t") for line in (FOLDER / "persons.tsv").read_text().splitlines()]
    return [_build_task(name, said, asked=draw.randrange(2)) for name, said in persons if name not in shown]


def _build_task(name: str, said: str, asked: int) -> dict[str, object]:
    answer = re.findall(r"\d{4}", said)[asked]
    return {
        "key": f"{'died' if asked else 'born'}-{name.replace(' ', '-')}",
        "prompt": QUESTIONS[asked].format(name=name),
        "env_key": "search",
        "verifier_code": VERIFIER.format(answer=answer),
        "config": {"answer": answer},
    }
