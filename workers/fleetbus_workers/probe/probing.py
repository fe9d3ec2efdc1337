"""The run of a probe: finds where right answers go, says everything to every case, each so many times in different order.

Above it is `fleetbus probe`; below it a `ProbeGrader` and the pure judging of what came of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import anyio
import msgspec

from fleetbus.core.diagnosis.facts import mean_of
from fleetbus.core.probe.answers import is_same
from fleetbus.core.probe.findings import Graded, ProbeReport
from fleetbus.core.probe.judging import judge
from fleetbus.core.probe.slots import DONE, Slot, find_slot, list_slots
from fleetbus.core.probe.variants import REFERENCE, Variant, build_lazy, build_odd, build_same, build_wrong
from fleetbus.errors import UserError
from fleetbus_workers.probe.cases import Case
from fleetbus_workers.probe.graders import ProbeGrader, Verdict

CALIBRATING = 6
"""Cases that slots are tried with."""

ENOUGH_FAILURES = 3
"""Cases without a verdict after which one thing to say is not tried on others: each may have taken all of its time limit."""

HOPELESS = 16
"""Gradings without any verdict after which no further slot is tried, and after twice as many nothing else: a grader that hangs
takes all of its time limit each time."""

OTHERS = 2
"""Right answers of other tasks that are tried on a task."""


class _Job(msgspec.Struct, kw_only=True, eq=False):
    case: Case
    variant: Variant
    is_idle: bool = False
    is_sampled: bool = False
    rewards: list[float | None] = []
    reason: str = ""


class Prober:
    """Probes with a grader that is open. ``repeat``: so often each answer is graded; ``places`` at a time."""

    def __init__(self, grader: ProbeGrader, *, repeat: int, places: int, success: float) -> None:
        self._grader = grader
        self._repeat = repeat
        self._places = places
        self._success = success
        self._failures: Counter[str] = Counter()
        self._unjudged, self._has_verdict = 0, False
        self.gradings = 0

    async def run(self, cases: Sequence[Case]) -> ProbeReport:
        """The report; raises `UserError` if there is nothing to be graded, or no verdict at all."""
        cases = [case for case in cases if self._grader.can_grade(case)]
        if not cases:
            raise UserError("nothing to probe: no task that can be graded")
        slot = await self._find_slot(cases)
        jobs = [job for place, case in enumerate(cases) for job in self._build_jobs(case, _pick_others(cases, place), slot)]
        for turn in range(self._repeat):
            await self._grade_all(jobs[::-1] if turn % 2 else jobs)
        graded = [_note(job) for job in jobs if job.rewards]
        if all(each.reward is None for each in graded):
            advice = ": give --environment SPEC" if "no environment" in graded[0].reason else ""
            raise UserError(f"the grader gave no verdict on anything: {graded[0].reason or 'no reason'}{advice}")
        name = slot.name if slot is not None else ""
        return judge(graded, slot=name, success=self._success, gradings=self.gradings)

    async def _find_slot(self, cases: Sequence[Case]) -> Slot | None:
        """The slot in which right answers earn most, the plainest of several; None if nothing is earned."""
        known = [case for case in cases if case.answer is not None][:CALIBRATING]
        if not known:
            return None
        seen = [slot for case in known[:2] if case.said and (slot := find_slot(case.said, case.answer or ""))]
        slots = [*list_slots(known[0].prompt, ends=self._grader.ends), *seen]
        earned: defaultdict[int, list[float]] = defaultdict(list)

        async def try_slot(place: int, case: Case) -> None:
            async with room:
                hopeless = self._is_hopeless(HOPELESS)
                text = slots[place].fill(case.answer or "")
                reward = None if hopeless else (await self._ask(case, text, after_work=True))[0]
            earned[place].append(reward or 0.0)

        room = anyio.CapacityLimiter(self._places)
        async with anyio.create_task_group() as tasks:
            for place in range(len(slots)):
                for case in known:
                    tasks.start_soon(try_slot, place, case)
        best = max(range(len(slots)), key=lambda place: (round(mean_of(earned[place]), 6), -place))
        return slots[best] if mean_of(earned[best]) > 0 else None

    def _build_jobs(self, case: Case, others: list[str], slot: Slot | None) -> list[_Job]:
        bare = slot or Slot(name="bare")
        ends = [bare.end] if slot is not None or not self._grader.ends else ["", DONE]
        isolated = self._grader.is_isolated
        variants = [each for end in ends for each in build_lazy(case.prompt, case.answer, bare, end=end, isolated=isolated)]
        if case.answer is not None:
            variants.append(Variant(name=REFERENCE, sort="any", text=bare.fill(case.answer)))
            variants += [*build_wrong(case.answer, others, bare), *build_same(case.answer, bare)]
        variants += build_odd(case.answer, bare)
        jobs = [_Job(case=case, variant=each) for each in variants]
        jobs += [_Job(case=case, variant=Variant(name=n, sort="lazy", text=None), is_idle=True) for n in self._grader.idle]
        for each in case.sampled:
            then = msgspec.structs.replace(case, before=each.before, conversation=each.conversation)
            jobs.append(_Job(case=then, variant=Variant(name=each.name, sort=each.sort, text=each.text), is_sampled=True))
        return jobs

    async def _grade_all(self, jobs: Sequence[_Job]) -> None:
        room = anyio.Semaphore(self._places)

        async def grade(job: _Job) -> None:
            try:
                await self._grade(job)
            finally:
                room.release()

        async with anyio.create_task_group() as tasks:
            for job in jobs:
                await room.acquire()
                tasks.start_soon(grade, job)

    async def _grade(self, job: _Job) -> None:
        name = job.variant.name
        if self._failures[name] >= ENOUGH_FAILURES or self._is_hopeless(2 * HOPELESS):
            return
        if job.is_idle:
            self.gradings += 1
            reward, reason = self._note_verdict(await self._grader.grade_idle(job.case, name))
        else:
            reward, reason = await self._ask(
                job.case, job.variant.text, after_work=job.variant.sort != "lazy" or job.is_sampled
            )
        self._failures[name] += reward is None
        job.rewards = [*job.rewards, reward]
        job.reason = job.reason if reward is not None else reason

    async def _ask(self, case: Case, text: str | None, *, after_work: bool) -> Verdict:
        self.gradings += 1
        return self._note_verdict(await self._grader.grade(case, text, after_work=after_work))

    def _note_verdict(self, verdict: Verdict) -> Verdict:
        self._has_verdict |= verdict[0] is not None
        self._unjudged += verdict[0] is None
        return verdict

    def _is_hopeless(self, tries: int) -> bool:
        return not self._has_verdict and self._unjudged >= tries


def _pick_others(cases: Sequence[Case], place: int) -> list[str]:
    """Right answers of the cases that follow, those that say something else."""
    own = cases[place].answer
    found: list[str] = []
    for case in [*cases[place + 1 :], *cases[:place]]:
        if own is not None and case.answer is not None and not any(is_same(case.answer, each) for each in (own, *found)):
            found.append(case.answer)
        if len(found) == OTHERS:
            break
    return found


def _note(job: _Job) -> Graded:
    variant = job.variant
    return Graded(
        case=job.case.task.key,
        name=variant.name,
        sort=variant.sort,
        said=variant.text,
        rewards=tuple(job.rewards),
        reason=job.reason,
        pair=variant.pair,
        exclusive=variant.exclusive,
        dress=variant.dress,
        source="sampled" if job.is_sampled else "made",
    )
