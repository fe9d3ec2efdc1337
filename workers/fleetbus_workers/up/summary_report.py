"""The end of a run: the summary as a JSON file and as a few lines of text."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec

from fleetbus.config.run_folder import RunFolder
from fleetbus.files import replace_file
from fleetbus_workers.observe.run.formatting import format_duration
from fleetbus_workers.observe.run.resume_command import build_resume_command
from fleetbus_workers.observe.run.termination import compute_next_step_goal
from fleetbus_workers.up.summary_builder import Summary

REPORT_WIDTH = 80
LARGE_ERROR = 0.03
"""A standard error of a success from which on it is said."""


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
    except (OSError, msgspec.DecodeError):
        return None


def format_report(summary: Summary, folder: RunFolder, shown: Callable[[Path], str], *, commands: bool = True) -> list[str]:
    """Final report: success before and after, cost, location of the files and, with ``commands``, what to type next."""
    lines = [
        _format_success(summary),
        *_format_certainty(summary),
        _format_cost(summary),
        *textwrap.wrap(summary.signal, REPORT_WIDTH),
    ]
    return [*lines, *_format_locations(folder, shown), *(_format_next_commands(summary, folder) if commands else ())]


def format_finished_report(
    summary: Summary, folder: RunFolder, shown: Callable[[Path], str], *, commands: bool = True
) -> list[str]:
    """The same for a finished run that is called again."""
    lines = [f"run {summary.run} is finished: {_format_success(summary)}", *_format_locations(folder, shown)]
    return [*lines, *(_format_next_commands(summary, folder) if commands else ())]


def _format_next_commands(summary: Summary, folder: RunFolder) -> list[str]:
    return [f"  {'continue' if at == 0 else '':8} {way}" for at, way in enumerate(_list_next_commands(summary, folder))]


def _format_locations(folder: RunFolder, shown: Callable[[Path], str]) -> list[str]:
    files = {"model": folder.model, "picture": folder.picture, "summary": folder.summary}
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
        return f"{'finished' if summary.finished else 'stopped'}{begun}"
    before = "" if start is None else f"{start:.1%} → "
    after = "" if greedy is None else f", {greedy:.1%} greedy"
    return f"success on held-out tasks {before}{end:.1%} sampled{after}{_format_rewards(summary)}"


def _format_certainty(summary: Summary) -> list[str]:
    """Say how far the success at the end can be trusted: the error of a small set of tasks, and episodes without a grade."""
    end, error, of_all = summary.success_end, summary.success_error.get("end", 0.0), summary.success_of_all.get("end")
    if end is None:
        return []
    words = [f"standard error {error:.1%} (evaluation.episodes)"] if error >= LARGE_ERROR else []
    if of_all is not None and of_all < end:
        words.append(f"{of_all:.1%} of all episodes, those without a grade included")
    return [f"at the end: {', '.join(words)}"] if words else []


def _format_rewards(summary: Summary) -> str:
    """The mean rewards beside the successes; nothing where they say the same."""
    start, end, greedy = summary.reward_start, summary.reward_end, summary.reward_end_greedy
    if end is None or (start, end, greedy) == (summary.success_start, summary.success_end, summary.success_end_greedy):
        return ""
    before = "" if start is None else f"{start:.3f} → "
    after = "" if greedy is None else f", {greedy:.3f} greedy"
    return f"; mean reward {before}{end:.3f}{after}"


def _format_cost(summary: Summary) -> str:
    excluded = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in sorted(summary.episodes_excluded.items()))
    trained = f"{summary.optimizer_steps} steps, {summary.episodes_trained:,} episodes trained"
    return f"{trained}{f', excluded: {excluded}' if excluded else ''} · {format_duration(summary.wall_seconds)}"
