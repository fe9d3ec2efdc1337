"""A real fleet under faults: nats-server, two environment workers, two inference workers and the learner, as processes.

    python benchmarks/chaos.py --seed 1 --seconds 120 --quiet 60 --json
    python benchmarks/chaos.py --kills --seconds 240 --quiet 20 --json      # one kill at a time: what recovery takes
    python benchmarks/chaos.py --segments --seconds 45 --quiet 20 --json    # in a context too small for a whole episode
    python benchmarks/chaos.py --seats --seconds 60 --quiet 15 --json       # Kuhn poker: two seats in each episode
    python benchmarks/chaos.py --opponent --seconds 60 --quiet 15 --json    # one of them another policy's, behind a URL
    python benchmarks/chaos.py --two-learners --seconds 60 --json           # a proposer and a solver, with two learners

From a seed, members are killed (SIGKILL), paused (SIGSTOP, SIGCONT) and terminated while they train the starter policy; what
ended is started again. Then comes a quiet time, the learner stops, every episode gets its outcome, a last learner evaluates the
checkpointed policy on held-out tasks, the workers drain, and the log is audited: its books, and by digest that what was trained
is what was sampled. Exits with 1 if an invariant is broken: unbalanced books, an episode that is not proven, without an outcome
or trained twice, a process left behind.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import msgspec
import structlog

from benchmarks.chaos_faults import MEAN_SECONDS, ROUND_SECONDS, Fault, plan_faults, plan_kills, plan_kills_by_policy
from benchmarks.chaos_policies import build_policies, wait_until_trained
from benchmarks.chaos_processes import CONFIG, MAIN_POLICY, ChaosDeployment, open_run_folder
from benchmarks.chaos_recovery import Entry, Heard, Recovery, build_recovery
from benchmarks.opponent_server import run_opponent
from benchmarks.until_signal import run_until_signal
from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.config.load import dump_configuration
from fleetbus.config.seats import configure_learner, list_policies, parse_seats
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    EpisodeSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    LimitSettings,
    LogSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.core.audit.findings import Report
from fleetbus.log.archive_reader import scan_archive_and_log
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import (
    MESSAGES,
    AttemptStarted,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    Heartbeat,
    MalformedMessage,
    Message,
    Observation,
    Subjects,
    WorkerStarted,
    decode,
)
from fleetbus_schemas.message import decode_any
from fleetbus_workers.learner.digest_audit import audit_digests
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.process_plans import build_stream_plan
from fleetbus_workers.up.seat_workers import list_seat_options
from fleetbus_workers.up.summary_builder import Summary, build_summary

RUN = "chaos"
PLACES = {"environment": 2, "inference": 2, "learner": 1}
LEARNING_RATE = 1e-4
"""A third of the default: a batch is a quarter of the default's, and at 2.5e-4 one of five runs lost its policy to noise."""

SMALL_CONTEXT_TOKENS = 250
"""With ``--segments``: most episodes drop turns. None counts as poison, however often its workers are killed."""

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
KUHN, PROPOSER = f"{EXAMPLES}/kuhn.py:Kuhn", f"{EXAMPLES}/proposer.py:Spelling"

STRIKE_PATIENCE_SECONDS = 5.0
"""With ``--segments`` a fault waits so long for a turn of a later segment to be asked for, and strikes while it is out."""

START_SECONDS = 180.0
LEARNER_STOP_SECONDS = 30.0
LAST_EVALUATION_SECONDS = 120.0
DRAIN_SECONDS = 5.0
STOP_SECONDS = 15.0

Plan = argparse.Namespace


def configuration(url: str, folder: Path, plan: Plan, opponent: str = "") -> Configuration:
    """Small batches, frequent checkpoints, no last step: the run is stopped from outside."""
    environment, inference = EnvironmentSettings(), InferenceSettings()
    if plan.segments:
        environment = EnvironmentSettings(compaction="drop", compaction_turns=1, compaction_share=0.8, max_attempts=9)
        inference = InferenceSettings(max_model_len=SMALL_CONTEXT_TOKENS)
    run = RunSettings(name=RUN, folder=str(folder / "runs"), seed=plan.seed)
    if plan.seats:
        example, seats = (KUHN, opponent and f"second={opponent}") if not plan.two_learners else (PROPOSER, "solver=train")
        tasks = str(Path(example.partition(":")[0]).with_suffix(".json"))
        run = msgspec.structs.replace(run, environment=example, tasks=tasks, seats=seats)
    return Configuration(
        run=run,
        nats=NatsSettings(url=url),
        episode=EpisodeSettings(max_tokens=10) if plan.two_learners else EpisodeSettings(),
        limits=LimitSettings(episode=60, grace=10, drain=DRAIN_SECONDS),
        environment=environment,
        inference=inference,
        learner=LearnerSettings(steps=100_000, groups=plan.groups, learning_rate=plan.learning_rate, checkpoint_every=2),
        evaluation=EvaluationSettings(episodes=plan.evaluate, greedy=False),
        log=LogSettings(level="info"),
    )


class Chaos:
    """One run, from the first process to the audit."""

    def __init__(self, bus: Bus, fleet: ChaosDeployment, plan: Plan, settings: Configuration) -> None:
        self._bus = bus
        self._fleet = fleet
        self._plan = plan
        self._limits = settings.limits
        self._policies = list_policies(settings.run)
        self._subjects = Subjects(RUN)
        self._heard: list[Heard] = []
        self._late_to_stop: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Everything; what the run amounted to."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            tasks.start_soon(self._tell_of_later_segments)
            for member in self._fleet.members:
                tasks.start_soon(member.keep_running)
            await self._wait_until_started()
            if self._plan.two_learners:
                with anyio.fail_after(START_SECONDS):
                    await wait_until_trained(self._bus, [self._subjects.train(policy) for policy in self._policies])
            self._print("the fleet is at work")
            await self._fleet.inject_faults(_build_faults(self._plan, self._policies))
            self._print(f"{len(self._fleet.injected)} faults; quiet now")
            await anyio.sleep(self._plan.quiet)
            await self._retire("learner", LEARNER_STOP_SECONDS)
            self._print("the learner has stopped")
            if self._plan.evaluate:
                await self._run_final_evaluation(tasks)
            await self._wait_all_finished()
            self._print("every episode has an outcome, or its time is up")
            await self._retire("environment", STOP_SECONDS)
            await self._retire("inference", STOP_SECONDS)
            tasks.cancel_scope.cancel()
        return await self._report()

    async def _wait_until_started(self) -> None:
        """Every place has said hello; raises `TimeoutError`."""
        waiting = {member.name or member.role for member in self._fleet.members}
        with anyio.fail_after(START_SECONDS):
            async with self._bus.read([self._subjects.life("*", "*")]) as reader:
                started: set[str] = set()
                while len(started) < len(waiting):
                    started |= {hello.worker for _, hello in decode_entries(WorkerStarted, [await reader.receive()])}

    async def _listen(self) -> None:
        async with self._bus.listen(self._subjects.heartbeats) as heartbeats:
            while True:
                subject, payload = await heartbeats.receive()
                try:
                    self._heard.append(Heard(time.time_ns(), decode(Heartbeat, payload, subject=subject)))
                except MalformedMessage:
                    continue

    async def _tell_of_later_segments(self) -> None:
        async with self._bus.read(
            [self._subjects.observations()], start=(await self._bus.log_state()).last_sequence + 1
        ) as reader:
            while True:
                for _, observation in decode_entries(Observation, [await reader.receive()]):
                    if observation.segment:
                        self._fleet.moment.notify()

    async def _retire(self, role: str, within_seconds: float) -> None:
        async with anyio.create_task_group() as tasks:
            for member in self._fleet.of(role):

                async def retire(member: Any = member) -> None:
                    if not await member.retire(within_seconds):
                        self._late_to_stop.append(member.name)

                tasks.start_soon(retire)

    async def _run_final_evaluation(self, tasks: anyio.abc.TaskGroup) -> None:
        """A further learner whose last step is the checkpointed one has nothing to train: it evaluates and finishes."""
        stored = [entry async for entry in self._bus.scan([self._subjects.train(MAIN_POLICY)])]
        checkpoints = [message for entry in stored if isinstance(message := _decode_message(entry.payload), CheckpointStored)]
        if not checkpoints:
            return
        member = self._fleet.member("learner", "learner-last", "--learner-steps", str(checkpoints[-1].step), final=True)
        self._fleet.members.append(member)
        tasks.start_soon(member.keep_running)
        with anyio.move_on_after(LAST_EVALUATION_SECONDS):
            await member.gone.wait()
            return
        await self._retire("learner", LEARNER_STOP_SECONDS)

    async def _wait_all_finished(self) -> None:
        """Every request has a result: environment workers alone see to it once the deadline has passed."""
        open_requests: set[str] = set()
        position = 1
        with anyio.move_on_after(self._limits.episode + self._limits.grace + STOP_SECONDS):
            while True:
                async for entry in self._bus.scan([self._subjects.tasks(), self._subjects.episodes], start=position):
                    position = entry.sequence + 1
                    match _decode_message(entry.payload):
                        case EpisodeRequested(episode_id=episode):
                            open_requests.add(episode)
                        case EpisodeFinished(episode_id=episode):
                            open_requests.discard(episode)
                if not open_requests:
                    return
                await anyio.sleep(0.5)

    async def _report(self) -> dict[str, Any]:
        stored = [entry async for entry in self._bus.scan([self._subjects.log])]
        log = [Entry(entry.time_ns, entry.subject, message) for entry in stored if (message := _decode_message(entry.payload))]
        audit = await audit_run(self._bus, self._subjects)
        scan = partial(scan_archive_and_log, self._bus, self._subjects, None)
        proof = await audit_digests(scan, last_sequence=audit.last_sequence)
        audit = msgspec.structs.replace(audit, proven=proof.proven, findings=(*audit.findings, *proof.findings))
        book = Progress(1)
        for entry in log:
            book.apply(entry.message, 0)
        summary = build_summary(book, run=RUN, seed=self._plan.seed, wall_seconds=0.0)
        figures = _build_figures(log, audit, summary)
        self._fleet.write_history()
        return {
            "seed": self._plan.seed,
            "seconds": self._plan.seconds,
            "quiet": self._plan.quiet,
            "faults": _count_by_role(self._fleet),
            "faults_skipped": self._fleet.skipped,
            "unplanned_exits": [f"{each.name}: {each.status}" for each in self._fleet.ended if not each.planned],
            "late_to_stop": self._late_to_stop,
            **figures,
            **({"policies": build_policies(log, self._policies)} if self._plan.two_learners else {}),
            "recovery_seconds": build_recovery(Recovery(log, self._fleet.injected, self._heard)),
            "left_behind": await self._fleet.find_survivors(),
        }

    def _print(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _build_faults(plan: Plan, policies: Sequence[str]) -> list[Fault]:
    if plan.two_learners:
        return plan_kills_by_policy(plan.seed, plan.seconds, policies, plan.round)
    if plan.kills:
        return plan_kills(plan.seed, plan.seconds)
    faults = plan_faults(plan.seed, plan.seconds, mean_seconds=plan.mean)
    if plan.segments:  # who drains leaves nothing in mid-segment
        faults = [msgspec.structs.replace(fault, kind="kill") if fault.kind == "terminate" else fault for fault in faults]
    return faults


def _decode_message(payload: bytes) -> Message | None:
    try:
        return decode_any(MESSAGES, payload)
    except MalformedMessage:
        return None


def _build_figures(log: Iterable[Entry], audit: Report, summary: Summary) -> dict[str, Any]:
    requested = {entry.message.episode_id for entry in log if isinstance(entry.message, EpisodeRequested)}
    results = [entry.message for entry in log if isinstance(entry.message, EpisodeFinished)]
    found = {finding.kind: finding.count for finding in audit.findings}
    return {
        "optimizer_steps": summary.optimizer_steps,
        "steps_trained_in_all": audit.steps,
        "lineages": len(audit.lineages),
        "success_start": summary.success_start,
        "success_end": summary.success_end,
        "max_logprob_difference": summary.max_logprob_difference,
        "success_by_step": summary.success_by_step,
        "episodes": dict(Counter(result.outcome for result in results)),
        "error_classes": dict(Counter(result.error_class for result in results if result.error_class)),
        "attempts_per_episode": dict(sorted(Counter(result.attempts for result in results).items())),
        "without_outcome": len(requested - {result.episode_id for result in results}),
        "trained_twice": found.get("trained_twice", 0),
        "proven": audit.proven,
        "segments_per_episode": dict(sorted(Counter(max(len(result.segments), 1) for result in results).items())),
        "taken_over_between_segments": _count_taken_over(log),
        "seats_per_episode": dict(sorted(Counter(len(result.seats) for result in results).items())),
        "audit_balanced": audit.balanced,
        "audit_findings": {finding.kind: [finding.count, *finding.ids[:5]] for finding in audit.findings},
        "books": msgspec.to_builtins(audit.books),
    }


def _count_taken_over(log: Iterable[Entry]) -> int:
    """Episodes of several segments that a later attempt went on with when the first of them was over."""
    resumed: dict[str, int] = {}
    cut: dict[str, int] = {}
    for entry in log:
        match entry.message:
            case AttemptStarted() as claim if claim.resumed_at_turn:
                resumed[claim.episode_id] = claim.resumed_at_turn
            case EpisodeFinished() as result if result.segments:
                cut[result.episode_id] = result.segments[1].first_turn
    return sum(turn >= cut[episode] for episode, turn in resumed.items() if episode in cut)


def _count_by_role(fleet: ChaosDeployment) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for fault in fleet.injected:
        counts.setdefault(fault.role, Counter())[fault.kind] += 1
    return {role: dict(kinds) for role, kinds in sorted(counts.items())}


async def run_chaos(plan: Plan, opponent: str = "") -> dict[str, Any]:
    """The report of one run; raises `TimeoutError` if it does not end in time."""
    limit = plan.seconds + plan.quiet + 2 * START_SECONDS + 2 * LEARNER_STOP_SECONDS + LAST_EVALUATION_SECONDS + 150
    async with open_run_folder(plan.folder) as folder, run_server(folder / "nats", monitor_port=None) as server:
        settings = configuration(server.url, folder, plan, opponent)
        (folder / CONFIG).write_bytes(dump_configuration(settings))
        with anyio.fail_after(limit):
            async with connect(server.url, run=RUN, role="test", worker="chaos") as bus:
                await bus.declare(build_stream_plan(settings))
                patience = STRIKE_PATIENCE_SECONDS if plan.segments else 0.0
                fleet = ChaosDeployment(bus, Subjects(RUN), server, folder, PLACES, patience=patience)
                for number, seat in enumerate(2 * parse_seats(settings.run.seats)):
                    options, place = list_seat_options(settings, seat), f"inference-{seat.policy}-{number}"
                    fleet.members.append(fleet.member("inference", place, *options, policy=seat.policy))
                    if seat.trained and number == 0:
                        config = f"config-{seat.policy}.json"
                        (folder / config).write_bytes(dump_configuration(configure_learner(settings, seat)))
                        learner = fleet.member("learner", f"learner-{seat.policy}", policy=seat.policy, config=config)
                        fleet.members.append(learner)
                return await Chaos(bus, fleet, plan, settings).run()


def parse_arguments() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="how long faults happen")
    parser.add_argument("--quiet", type=float, default=60, help="how long none happens afterwards")
    parser.add_argument("--mean", type=float, default=MEAN_SECONDS, help="mean seconds between faults of workers")
    parser.add_argument("--kills", action="store_true", help="kills alone, one at a time: measures recovery")
    parser.add_argument("--segments", action="store_true", help="a context too small for a whole episode: turns are dropped")
    parser.add_argument("--seats", action="store_true", help="Kuhn poker instead of the warehouse: two seats in each episode")
    parser.add_argument("--opponent", action="store_true", help="as --seats, and a server that fails at times has one of them")
    parser.add_argument("--two-learners", action="store_true", help="a proposer, and a solver that another learner trains")
    parser.add_argument("--round", type=float, default=ROUND_SECONDS, help="with two learners: seconds between kills of a kind")
    parser.add_argument("--groups", type=int, default=4, help="groups of eight episodes per optimizer step")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--evaluate", type=int, default=128, help="held-out episodes at the start and at the end; 0: none")
    parser.add_argument("--folder", help="keep stores and logs there")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    plan = parser.parse_args()
    plan.seats = plan.seats or plan.opponent or plan.two_learners
    if plan.seats:
        plan.evaluate = 0  # the last policy is the first one's opponent: neither is a success
    if plan.folder and (Path(plan.folder) / "nats").exists():
        parser.error(f"{plan.folder} holds a run already: name another folder")
    return plan


def is_sound(report: dict[str, Any]) -> bool:
    """The invariants that hold whatever is struck."""
    wrong = report["without_outcome"] or report["trained_twice"] or report["left_behind"]
    for policy in report.get("policies", {}).values():
        wrong = wrong or policy["trained_twice"] or policy["trained_by_the_wrong_learner"]
    return bool(report["audit_balanced"]) and not wrong


if __name__ == "__main__":
    options = parse_arguments()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with run_opponent(options.seed) as server:
        main = partial(run_chaos, options, server.url if options.opponent else "")
        outcome = anyio.run(run_until_signal, main, backend_options={"use_uvloop": True})
        answers = {"opponent_answers": server.answered, "opponent_failures": server.failed} if options.opponent else {}
    if not outcome:
        sys.exit(130)
    print(json.dumps(outcome | answers, indent=None if options.json else 2))
    sys.exit(0 if is_sound(outcome) else 1)
