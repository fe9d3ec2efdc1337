"""The end of a run: the summary as a JSON file and as a few lines of text."""

import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean

import msgspec

from fleetbus.config.run_folder import RunFolder, policy_folder_below
from fleetbus.files import replace_file
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.observe.run.formatting import format_duration, format_interval
from fleetbus_workers.observe.run.resume_command import build_resume_command
from fleetbus_workers.observe.run.termination import compute_next_step_goal
from fleetbus_workers.up.summary_builder import Summary

REPORT_WIDTH = 80
REWARD_PARTS = 10
"""The first and the last of so many parts of the steps are compared."""

LOST = ("no_signal", "fell")
"""Kinds of signal with which a policy learned nothing, or lost what it had learned."""


def write_summary(summary: Summary, *files: Path) -> None:
    """Write the summary as JSON, atomically, to each of the files."""
    content = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)


def load_summary(folder: RunFolder) -> Summary | None:
    """The summary that an earlier `up` wrote, or None if there is none or it is of another release."""
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=Summary)
    except (OSError, *UNREADABLE):
        return None


def format_report(summary: Summary, folder: RunFolder, shown: Callable[[Path], str], *, commands: bool = True) -> list[str]:
    """Final report: success before and after, cost, location of the files and, with ``commands``, what to type next."""
    others = (line for policy, other in summary.policies.items() for line in _format_policy(policy, other))
    lines = [_format_success(summary), _format_cost(summary), *others, *_format_certainty(summary), *_format_ungraded(summary)]
    lines += textwrap.wrap(summary.signal, REPORT_WIDTH)
    return [
        *lines,
        *_format_locations(folder, shown, summary.policies),
        *(_format_next_commands(summary, folder) if commands else ()),
    ]


def format_finished_report(
    summary: Summary, folder: RunFolder, shown: Callable[[Path], str], *, commands: bool = True
) -> list[str]:
    """The same for a finished run that is called again."""
    located = _format_locations(folder, shown, summary.policies)
    lines = [f"run {summary.run} is finished: {_format_success(summary)}", *located]
    return [*lines, *(_format_next_commands(summary, folder) if commands else ())]


def _format_next_commands(summary: Summary, folder: RunFolder) -> list[str]:
    return [f"  {'continue' if at == 0 else '':8} {way}" for at, way in enumerate(_list_next_commands(summary, folder))]


def _format_locations(folder: RunFolder, shown: Callable[[Path], str], policies: Iterable[str]) -> list[str]:
    models = {policy: policy_folder_below(folder, policy).model for policy in policies}
    files = {"model": folder.model, **models, "picture": folder.picture, "summary": folder.summary}
    return [f"  {name:8} {shown(path)}" for name, path in files.items() if path.exists()]


def _list_next_commands(summary: Summary, folder: RunFolder) -> list[str]:
    again, runs = build_resume_command(summary.run, folder.path.parent), folder.path.parent
    if not summary.finished:
        return [f"`{again}` resumes it"]
    further = f"`{again} --steps {compute_next_step_goal(summary.optimizer_steps)}` trains it further"
    return [further, f"`{build_resume_command('NAME', runs)}` starts another"]


def _format_success(summary: Summary) -> str:
    start, end, greedy = summary.success_start, summary.success_end, summary.success_end_greedy
    if end is None:
        begun = "" if start is None else f", success at the start {start:.1%}"
        return f"{_format_ending(summary)}{begun}"
    before = "" if start is None else f"{start:.1%} → "
    after = "" if greedy is None else f", {_format_greedy(summary, greedy)} greedy"
    lost = f"{_format_ending(summary)}; " if summary.signal_kind in LOST else ""
    return f"{lost}success on held-out tasks {before}{end:.1%} sampled{after}{_format_rewards(summary)}"


def _format_greedy(summary: Summary, end: float) -> str:
    start = summary.success_start_greedy
    return f"{end:.1%}" if start is None else f"{start:.1%} → {end:.1%}"


def _format_certainty(summary: Summary) -> list[str]:
    """Lines that say how sure the successes are: their 95 % intervals, and of how many tasks."""
    found = summary.intervals
    names = {"start": "start", "end": "end", "start_greedy": "greedy start", "end_greedy": "greedy end"}
    parts = [f"{shown} {format_interval(found[name])}" for name, shown in names.items() if name in found]
    of = f", of {summary.evaluated_tasks} tasks" if summary.evaluated_tasks else ""
    return textwrap.wrap(f"95% intervals: {', '.join(parts)}{of}", REPORT_WIDTH) if "end" in found else []


def _format_ending(summary: Summary) -> str:
    """The ending of a run, in the first words of its report: one with nothing to learn from is not called finished alone."""
    ending = "finished" if summary.finished else "stopped"
    return f"{ending} without a learning signal" if summary.signal_kind in LOST else ending


def _format_ungraded(summary: Summary) -> list[str]:
    """The success of all episodes at the end, where some have no grade."""
    end, of_all = summary.success_end, summary.success_of_all.get("end")
    if end is None or of_all is None or of_all >= end:
        return []
    return [f"at the end {of_all:.1%} of all episodes, those without a grade included"]


def _format_rewards(summary: Summary) -> str:
    """The mean rewards beside the successes; nothing where they say the same."""
    start, end, greedy = summary.reward_start, summary.reward_end, summary.reward_end_greedy
    if end is None or (start, end, greedy) == (summary.success_start, summary.success_end, summary.success_end_greedy):
        return ""
    before = "" if start is None else f"{start:.3f} → "
    after = "" if greedy is None else f", {greedy:.3f} greedy"
    return f"; mean reward {before}{end:.3f}{after}"


def _format_policy(policy: str, summary: Summary) -> Iterator[str]:
    """The training of the policy of a seat: its steps, and the mean reward of its seats in the first and the last of them."""
    rewards = [reward for reward in summary.reward_by_step if reward is not None]
    some = max(len(rewards) // REWARD_PARTS, 1)
    changed = f", reward {fmean(rewards[:some]):.3f} → {fmean(rewards[-some:]):.3f}" if rewards else ""
    ended = "" if summary.finished else "not finished, "
    yield from textwrap.wrap(f"{policy}: {ended}{_format_trained(summary)}{changed}", REPORT_WIDTH)


def _format_cost(summary: Summary) -> str:
    return f"{_format_trained(summary)} · {format_duration(summary.wall_seconds)}"


def _format_trained(summary: Summary) -> str:
    excluded = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in sorted(summary.episodes_excluded.items()))
    trained = f"{summary.optimizer_steps} steps, {summary.episodes_trained:,} episodes trained"
    return f"{trained}{f', excluded: {excluded}' if excluded else ''}"
