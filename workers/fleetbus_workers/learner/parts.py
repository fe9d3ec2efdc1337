"""The parts of a learner, made one after the other: each is given what it uses, and nothing that is made after it.

Who owns what: the ledger which requests are settled, the pool the groups, requests what was asked for, publication the
versions, checkpoints the files on the disk, and progress the step. Above it is the worker.
"""

from collections.abc import Callable
from typing import NamedTuple

import anyio
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.run_folder import RunFolder, policy_folder
from fleetbus.config.seats import find_joined_policy, list_joined_policies
from fleetbus.config.settings import Configuration
from fleetbus.core.training.ledger import Ledger
from fleetbus.delivery.requests import Requests
from fleetbus_schemas import Subjects
from fleetbus_workers.learner.admission import Admission
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.batch_training import BatchTraining
from fleetbus_workers.learner.checkpoint_storage import CheckpointStorage
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.evaluation import Evaluations
from fleetbus_workers.learner.evaluation_schedule import EvaluationSchedule
from fleetbus_workers.learner.group_judge import GroupJudge
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.joint_progress import JointProgress
from fleetbus_workers.learner.journal import FencedAppender
from fleetbus_workers.learner.league import LearnerLeague
from fleetbus_workers.learner.lineage_start import LineageStart
from fleetbus_workers.learner.pool import GroupPool, compute_max_replaced
from fleetbus_workers.learner.progress import Progress
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.results import Results
from fleetbus_workers.learner.resume import ResumePoint
from fleetbus_workers.learner.step_record import StepRecord
from fleetbus_workers.learner.token_records import TokenRecords
from fleetbus_workers.weights.store import get_object_store, open_store
from fleetbus_workers.weights.transfer_choice import open_sender


class LearnerParts(NamedTuple):
    """The parts that a learner works with."""

    appender: FencedAppender
    ledger: Ledger
    pool: GroupPool
    requests: Requests
    publication: Publication
    checkpoints: CheckpointStorage
    admission: Admission | JoinedRequests
    results: Results
    start: LineageStart
    batches: BatchTraining
    steps: StepRecord
    evaluations: EvaluationSchedule
    progress: Progress


def make_parts(
    bus: Bus,
    *,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    trainer: Trainer,
    curriculum: Curriculum,
    resume_point: ResumePoint,
    runtime: Runtime,
    judge: GroupJudge,
) -> LearnerParts:
    """The parts of a learner called ``name`` that begins at ``resume_point``; nothing runs and nothing is stored yet."""
    run, settings, folder = configuration.run, configuration.learner, policy_folder(configuration.run)
    subjects, lineage = Subjects(run.name), resume_point.lineage
    progress = Progress(lineage=lineage, step=resume_point.step)
    appender = FencedAppender(bus, subjects.train(run.policy), resume_point.train_last, lineage=lineage)
    requests = Requests(bus, subjects, configuration=configuration, worker=name, runtime=runtime)
    ledger = Ledger(resume_point.floor, resume_point.checkpoint.settled if resume_point.checkpoint else ())
    pool = GroupPool(
        ledger,
        minimum=settings.min_group_size,
        max_staleness=settings.max_staleness,
        stale_groups=settings.stale_groups,
        replace_flat=compute_max_replaced(configuration),
        max_abs_reward=configuration.environment.max_abs_reward,
        policy=find_joined_policy(configuration),
        is_log_full=lambda: requests.full,
    )
    of_league = msgspec.structs.replace(run, seats="") if settings.requested_by else run  # who joins draws and rates nobody
    league = LearnerLeague(of_league, resume_point.checkpoint.meetings if resume_point.checkpoint else ())
    publication = _make_publication(
        bus, subjects, trainer, configuration, folder, resume_point, runtime, league,
        lambda: league.list_needed(pool.group_ids),
    )  # fmt: skip
    checkpoints = CheckpointStorage(
        appender,
        trainer,
        runtime,
        folder=folder.checkpoints.absolute(),
        keep=settings.keep_checkpoints,
        is_voided=resume_point.is_voided,
        restarts=resume_point.restarts,
    )
    joined = _join(configuration, pool, resume_point)
    admission = joined or Admission(
        requests,
        pool,
        curriculum,
        settings=settings,
        lineage=lineage,
        floor=resume_point.floor,
        next_group=resume_point.next_group,
        progress=lambda: (progress.step, publication.version),
        joint=JointProgress(list_joined_policies(run)),
        league=league,
    )
    evaluations = Evaluations(
        requests,
        success_threshold=configuration.evaluation.success_threshold,
        max_abs_reward=configuration.environment.max_abs_reward,
    )
    return LearnerParts(
        appender=appender,
        ledger=ledger,
        pool=pool,
        requests=requests,
        publication=publication,
        checkpoints=checkpoints,
        admission=admission,
        results=Results(bus, subjects, requests, pool, evaluations, progress.counters, joined),
        start=LineageStart(
            bus, subjects, resume_point, trainer, runtime, appender=appender, publication=publication,
            checkpoints=checkpoints, pool=pool, requests=requests, admission=admission, judge=judge, league=league,
        ),
        batches=BatchTraining(bus, subjects, pool, judge, trainer, runtime, configuration=configuration, drain=drain),
        steps=StepRecord(
            bus, appender, ledger, pool, requests, admission, publication, checkpoints, progress,
            TokenRecords(folder.tokens, keep=settings.keep_token_records), league, settings=settings, runtime=runtime,
        ),
        evaluations=EvaluationSchedule(
            evaluations, curriculum, publication, appender, progress, configuration=configuration,
            evaluated=resume_point.evaluated,
        ),
        progress=progress,
    )  # fmt: skip


def _join(configuration: Configuration, pool: GroupPool, resume_point: ResumePoint) -> JoinedRequests | None:
    run, settings = configuration.run, configuration.learner
    if not settings.requested_by:
        return None
    return JoinedRequests(
        pool,
        policy=run.policy,
        requested_by=settings.requested_by,
        next_group=resume_point.next_group,
        steps=settings.steps,
        limits=configuration.limits,
    )


def _make_publication(
    bus: Bus,
    subjects: Subjects,
    trainer: Trainer,
    configuration: Configuration,
    folder: RunFolder,
    resume_point: ResumePoint,
    runtime: Runtime,
    league: LearnerLeague,
    list_needed: Callable[[], set[int]],
) -> Publication:
    run, weights = configuration.run, configuration.weights
    return Publication(
        bus,
        subjects,
        trainer,
        policy=run.policy,
        lineage=resume_point.lineage,
        folder=folder.weights,
        keep=configuration.learner.keep_weights,
        leagues=league.seats,
        baselines=resume_point.checkpoint.baselines if resume_point.checkpoint is not None else None,
        window=league.window,
        list_needed=list_needed,
        runtime=runtime,
        store=open_store(
            bus,
            weights.store,
            run=run.name,
            public_url=weights.public_url,
            policy=find_joined_policy(configuration),
        ),
        objects=get_object_store(bus, run.name),
        full_every=weights.full_every,
        sender=open_sender(bus, subjects, configuration, runtime),
    )
