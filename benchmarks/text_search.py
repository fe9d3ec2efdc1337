"""Full-text search over what was said: how long an index of a generated log takes, how large it is, how fast it answers.

    python benchmarks/text_search.py --episodes 100000 --json

Each episode has four turns, an Observation and an Action of 40 words each out of 20,000 whose frequencies are Zipf's. The log
is generated while it is indexed; what that alone takes is not counted. ``cpu`` is the CPU time of this process. A query is all
that a page asks for: the ids of all episodes that match, and the excerpts of 100 of them; each is the median of five.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.recording.said_text import find_said_text
from fleetbus.recording.text_index import TextIndex
from fleetbus.recording.text_indexing import BATCH_ENTRIES
from fleetbus_schemas import Action, ChatMessage, Observation, Subjects, encode

SUBJECTS = Subjects("r")
TURNS, WORDS, VOCABULARY, SHOWN = 4, 40, 20_000, 100
WORD_LIST = [f"word{number}" for number in range(VOCABULARY)]
WEIGHTS = list(itertools.accumulate(1 / rank for rank in range(1, VOCABULARY + 1)))
QUERIES = {
    "one episode": "needle",
    "rare word": "word19999",
    "frequent word": "word0",
    "two frequent words": "word0 word1",
    "phrase": '"word0 word1"',
    "prefix": "word1999*",
    "no match": "absent",
}


def generate_log(episodes: int) -> Iterator[StreamEntry]:
    """The entries of so many episodes, 64 of which run at a time."""
    source, sequence = random.Random(1), 0
    for first in range(0, episodes, 64):
        for turn in range(TURNS):
            for episode in range(first, min(first + 64, episodes)):
                id, words = f"e{episode:07}", source.choices(WORD_LIST, cum_weights=WEIGHTS, k=2 * WORDS)
                if episode == episodes // 2 and not turn:
                    words[0] = "needle"
                shown = Observation(
                    episode_id=id, attempt=1, turn=turn, policy="default", tokens_left=9, environment_lane="e0", deadline_ns=0,
                    messages=(ChatMessage(role="user", content=" ".join(words[:WORDS])),),
                )  # fmt: skip
                answer = Action(episode_id=id, attempt=1, turn=turn, text=" ".join(words[WORDS:]))
                for subject, message in (
                    (SUBJECTS.observation("default", "any", id), shown),
                    (SUBJECTS.action("e0", id), answer),
                ):
                    sequence += 1
                    yield StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=sequence)


def measure(episodes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, TextIndex(file := Path(folder) / "text.sqlite", "log") as index:
        log, entries, text_bytes, seconds, cpu_seconds = generate_log(episodes), 0, 0, 0.0, 0.0
        while batch := list(itertools.islice(log, BATCH_ENTRIES)):
            began, cpu = time.perf_counter(), time.process_time()
            texts = [text for entry in batch if (text := find_said_text(entry)) is not None]
            index.add(texts, batch[-1].sequence)
            seconds, cpu_seconds = seconds + time.perf_counter() - began, cpu_seconds + time.process_time() - cpu
            entries += len(batch)
            text_bytes += sum(len(text.text) for text in texts)
        row: dict[str, float] = {
            "episodes": episodes,
            "entries": entries,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds, 1),
            "cpu_us_per_entry": round(cpu_seconds / entries * 1e6, 1),
            "index_mb": round(file.stat().st_size / 1e6, 1),
            "bytes_per_byte_of_text": round(file.stat().st_size / text_bytes, 2),
        }
        for name, words in QUERIES.items():
            found, times, cpu_times = set[str](), list[float](), list[float]()
            for _ in range(5):
                began, cpu = time.perf_counter(), time.process_time()
                found = index.find_episodes(words)
                index.describe(words, sorted(found)[-SHOWN:])
                times.append(time.perf_counter() - began)
                cpu_times.append(time.process_time() - cpu)
            row[f"matches, {name}"] = len(found)
            row[f"ms, {name}"] = round(statistics.median(times) * 1e3, 1)
            row[f"cpu_ms, {name}"] = round(statistics.median(cpu_times) * 1e3, 1)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    row = measure(arguments.episodes)
    print(msgspec.json.encode(row).decode() if arguments.json else "\n".join(f"{name}: {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
