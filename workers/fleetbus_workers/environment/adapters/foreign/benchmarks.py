"""Benchmarks by name: tasks of another package, all of them, with the package's own verdicts.

Nothing is fetched: data and checker are in the package. Its version and the digest of its data stand in the report, and in the
log as the dataset's version of every episode. Above it is `fleetbus evaluate --benchmark`. See
docs/decisions/0248-benchmarks-say-what-they-are-of.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.tasks.files import build_tasks
from fleetbus_schemas import Task


class KnownBenchmark(NamedTuple):
    """The environment of a benchmark, and what its episodes need where no setting says otherwise: the most turns, the most
    tokens of a turn and of an episode."""

    spec: str
    turns: int
    turn_tokens: int
    tokens: int


BENCHMARKS = {
    "bfcl-multi-turn": KnownBenchmark("bfcl:multi_turn", 200, 1024, 32_768),
    "tau2-retail": KnownBenchmark("tau2:retail", 200, 1024, 32_768),
    "tau2-airline": KnownBenchmark("tau2:airline", 200, 1024, 32_768),
}
"""BFCL: at most 20 steps per turn of its user, and tools of some thousand tokens. tau2: 200 messages, as it plays itself."""

MOST_TASKS = 1_000_000


class BenchmarkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The benchmark that an evaluation played: its ``name`` with its arguments, ``package`` and ``version``, the ``digest`` of
    data and checker, and how many ``tasks`` it has, played or not."""

    name: str
    package: str
    version: str
    digest: str
    tasks: int


class Benchmark(NamedTuple):
    """A benchmark with its tasks, which name what they are of as their dataset's version."""

    facts: BenchmarkFacts
    known: KnownBenchmark
    spec: str
    python: str
    tasks: list[Task]

    def choose_tasks(self, count: int | None) -> list[Task]:
        """``count`` of the tasks, at equal distances, so that each category has its share; all for None."""
        wanted = min(count or len(self.tasks), len(self.tasks))
        return [self.tasks[place * len(self.tasks) // wanted] for place in range(wanted)]

    def fit(self, configuration: Configuration, given: Mapping[str, str], *, context: int = 0) -> Configuration:
        """The configuration with this environment and room for its episodes, up to the model's ``context`` (0: not known);
        settings in ``given`` stay."""
        room = min(self.known.tokens, context) if context else self.known.tokens
        wanted = {
            "episode": {
                "max_turns": self.known.turns,
                "max_tokens": min(self.known.turn_tokens, room),
                "max_episode_tokens": room,
            },
            "inference": {"max_model_len": room},
        }
        for table, values in wanted.items():
            chosen = {key: value for key, value in values.items() if f"{table}.{key}" not in given}
            changed = msgspec.structs.replace(getattr(configuration, table), **chosen)
            configuration = msgspec.structs.replace(configuration, **{table: changed})
        run = msgspec.structs.replace(configuration.run, environment=self.spec, tasks="")
        environment = msgspec.structs.replace(configuration.environment, python=self.python)
        return msgspec.structs.replace(configuration, run=run, environment=environment)


def load_benchmark(text: str, python: str) -> Benchmark:
    """The benchmark ``NAME [ARGUMENT=VALUE ...]``, read by the interpreter ``python``, which has its package. Raises
    `UserError`."""
    from fleetbus_workers.environment.adapters.foreign.tasks import list_tasks

    name, _, arguments = text.strip().partition(" ")
    if name not in BENCHMARKS:
        raise UserError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    if not python:
        kind = name.partition("-")[0]
        raise UserError(
            f"--benchmark {name}: name an interpreter for its package with --environment-python PATH, such as a new one "
            f"(python -m venv {kind}; {kind}/bin/python); what it lacks is then said, with the command that installs it"
        )
    known = BENCHMARKS[name]
    spec = f"{known.spec} {arguments.strip()}".strip()
    listed = list_tasks(spec, python, MOST_TASKS)
    source = {key: listed.source.get(key, "") for key in ("package", "version", "digest")}
    facts = BenchmarkFacts(name=text.strip(), tasks=len(listed.tasks), **source)
    version = f"{facts.package} {facts.version} {facts.digest}"
    tasks = [msgspec.structs.replace(task, dataset_version=version) for task in build_tasks(listed.tasks, name)]
    return Benchmark(facts, known, spec, python, tasks)
