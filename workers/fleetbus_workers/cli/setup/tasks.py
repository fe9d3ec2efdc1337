"""``fleetbus tasks``: check tasks before they are trained on, and split them into training and held-out ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus.core.training.splits import split_tasks
from fleetbus.errors import UserError
from fleetbus.tasks.datasets import redact_location
from fleetbus.tasks.files import check_dataset, check_verifiers, list_forgeable_verifiers, load_dataset
from fleetbus.tasks.output import write_split
from fleetbus_schemas import Task
from fleetbus_workers.cli.options import NumberRange
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import REFUSED
from fleetbus_workers.environment.keyed_specs import check_tasks_are_served, parse_keyed_specs
from fleetbus_workers.environment.specs import find_adapter

SHOWN_PROBLEMS = 20
LOCATION = click.argument("location", metavar="LOCATION")


@click.group("tasks")
def command() -> None:
    """Validate tasks, check their solutions, or split them into training and held-out tasks.

    LOCATION is a tasks file or a folder of them: a path, https://..., s3://..., with @VERSION at its end if there are several,
    as in data@v0.2 or s3://bucket/{version}/openenv/all_tool_use.json@v0.2; or harbor:DIR, a Harbor task or a folder of them.
    """


@command.command("validate", short_help="Read every task and report all errors")
@LOCATION
@click.option(
    "--environment", "specs", multiple=True, metavar="[KEY=]SPEC", help="Also check that these environments serve every task"
)
@json_option("what was found")
def validate(location: str, specs: tuple[str, ...], as_json: bool) -> int:
    """Read every task and report all errors with file and position. Exit status 0: valid; 2: errors found.

    Checks the fields, that keys are unique, that tasks fit into a message, and that verifiers compile. Warns of verifiers whose
    verdict the policy's code could forge; the exit status stays.
    """
    tasks, problems = check_dataset(location)
    problems += check_verifiers(tasks)
    if specs:
        problems += _find_unserved(specs, tasks)
    facts = _summarize_tasks(tasks) | {"problems": problems, "warnings": list_forgeable_verifiers(tasks)}
    print_json(facts) if as_json else _print_facts(facts, location)
    return REFUSED if problems else 0


@command.command("check", short_help="Play Harbor tasks with their own solution")
@LOCATION
@click.option("--parallel", type=click.IntRange(min=1, max=64), default=4, help="Tasks at a time [4]")
@click.option("--seconds", type=NumberRange(1, 86_400), default=600.0, help="Time limit of a solution and of its tests [600]")
@click.option(
    "--boxes", type=click.Choice(["auto", "docker", "sandbox"]), default="auto", help="What they are played in [auto]"
)
@json_option("what was found")
def check(location: str, parallel: int, seconds: float, boxes: str, as_json: bool) -> int:
    """Play each Harbor task twice: its own solution must get 1, doing nothing must not. LOCATION is harbor:DIR.

    Exit status 0: all tasks hold; 2: some do not, or cannot be played.
    """

    from fleetbus_workers.environment.adapters.harbor.check import check_tasks, is_harbor

    if not is_harbor(location):
        raise UserError(f"{location}: only Harbor tasks have a solution to be checked: give harbor:DIR")
    settings = Configuration(
        environment=EnvironmentSettings(boxes=boxes, slots=parallel),  # type: ignore[arg-type]
        limits=LimitSettings(verify=seconds, tool_call=seconds),
    )
    findings = run_async(check_tasks, location, load_dataset(location), settings, parallel)
    if as_json:
        print_json({"tasks": [msgspec.structs.asdict(finding) for finding in findings]})
    else:
        width = max(len(finding.key) for finding in findings)
        for finding in findings:
            print(
                f"{finding.key:<{width}}  solution {finding.solution}  nothing {finding.nothing}  {finding.problem or 'holds'}"
            )
    return REFUSED if any(finding.problem for finding in findings) else 0


@command.command("import", short_help="Write the tasks of an environment of another package")
@click.argument("spec", metavar="SPEC")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("tasks.json"), help="File [tasks.json]")
@click.option("--count", type=click.IntRange(min=1, max=1_000_000), default=1000, help="At most so many, from the first [1000]")
@click.option("--environment-python", "python", default="", metavar="PATH", help="Interpreter that has the package")
@click.option("--env", default="", metavar="KEY", help="Environment key of the tasks, where a run has several environments")
def import_tasks(spec: str, output: Path, count: int, python: str, env: str) -> int:
    """Write the tasks of verifiers:NAME, inspect:TASK, bfcl:CATEGORY, tau2:DOMAIN or ors:URL#NAME as a tasks file: their places
    in the package's or server's own data. Prompts in the file are there to be read, for the package sends its own."""
    tasks = _list_tasks(spec, python, count, env)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(tasks), indent=1))
    print(f"wrote {len(tasks)} tasks to {output}")
    return 0


def _list_tasks(spec: str, python: str, count: int, env: str) -> list[dict[str, Any]]:
    if spec.partition(":")[0] == "ors":
        from fleetbus_workers.environment.adapters.ors.tasks import list_tasks as list_served

        return list_served(spec, count, env=env)
    if find_adapter(spec).build != "foreign.factory:build":
        raise UserError(f"environment {spec!r} lists no tasks; docs/environments.md says what its tasks hold")
    from fleetbus_workers.environment.adapters.foreign.tasks import list_tasks

    return list_tasks(spec, python, count, env=env).tasks


@command.command("split", short_help="Write training and held-out tasks")
@LOCATION
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("."), help="Folder to write to [.]")
@click.option("--format", "formats", type=click.Choice(["json", "parquet", "both"]), default="json", help="File format [json]")
@click.option("--eval-ratio", type=NumberRange(0, 1), default=0.10, help="Held-out share of each environment [0.1]")
@click.option("--max-eval", type=click.IntRange(min=0), default=30, help="Maximum of held-out tasks per environment [30]")
@click.option("--min-eval", type=click.IntRange(min=0), default=1, help="Minimum of held-out tasks per environment [1]")
@click.option("--all-or-none", is_flag=True, help="Hold out nothing of an environment whose share is below --min-eval")
@click.option("--hold-out", multiple=True, metavar="[MODALITY:]ENV", help="Environment to hold out completely; repeatable")
@click.option(
    "--max-eval-total", type=click.IntRange(min=0), help="Maximum of held-out tasks of all environments together [no limit]"
)
@click.option(
    "--max-env-share",
    type=NumberRange(0, 1, min_open=True),
    default=1.0,
    help="Maximum share of training tasks from one environment [1.0]",
)
@click.option(
    "--modality",
    type=click.Choice(["tool_use", "computer_use", "browser_use", "all"]),
    default="all",
    help="Only tasks of this kind [all]",
)
@click.option("--env", "environments", multiple=True, metavar="ENV", help="Only tasks of this environment; repeatable")
@click.option("--difficulty", "difficulties", multiple=True, type=int, help="Only tasks of this difficulty; repeatable")
@click.option("--max-tasks", type=click.IntRange(min=1), help="Use at most N of the selected tasks")
@json_option("what was written")
def split(location: str, output: Path, formats: str, as_json: bool, **choices: Any) -> int:
    """Write train and validation tasks, held out per environment by a hash of the task key.

    A task is always on the same side. To split as Fleet's data preparation does: --eval-ratio 0.2 --max-eval 20 --min-eval 5
    --all-or-none --max-eval-total 96 --max-env-share 0.2.
    """
    tasks = _select_tasks(load_dataset(location), choices)
    if not tasks:
        raise UserError(f"{redact_location(location)}: no task is left to split; loosen --modality, --env or --difficulty")
    parameters = {
        name: choices[name] for name in ("eval_ratio", "max_eval", "min_eval", "all_or_none", "max_eval_total", "max_env_share")
    }
    parameters["held_out"] = choices["hold_out"] or ("computer_use:instacart",)
    train, evaluation = split_tasks(tasks, **parameters)
    written = write_split(output, train, evaluation, formats=("json", "parquet") if formats == "both" else (formats,))
    facts = {
        "dataset_version": tasks[0].dataset_version,
        "parameters": parameters,
        "train": len(train),
        "validation": len(evaluation),
        "left_out": len(tasks) - len(train) - len(evaluation),
        "environments": _count_split(train, evaluation),
        "files": [str(path) for path in written],
    }
    print_json(facts) if as_json else _print_table(facts)
    return 0


def _select_tasks(tasks: Sequence[Task], choices: dict[str, Any]) -> list[Task]:
    selected = [
        task
        for task in tasks
        if choices["modality"] in ("all", task.modality)
        and (not choices["environments"] or task.env in choices["environments"])
        and (not choices["difficulties"] or task.config.get("difficulty") in choices["difficulties"])
    ]
    return selected[: choices["max_tasks"]]


def _find_unserved(specs: Sequence[str], tasks: Sequence[Task]) -> list[str]:
    try:
        check_tasks_are_served(parse_keyed_specs("\n".join(specs)), tasks)
    except UserError as error:
        return [str(error)]
    return []


def _summarize_tasks(tasks: Sequence[Task]) -> dict[str, object]:
    return {
        "dataset_version": tasks[0].dataset_version if tasks else "",
        "tasks": len(tasks),
        "without_verifier": sum(task.verifier is None for task in tasks),
        "environments": {env or "-": sum(task.env == env for task in tasks) for env in sorted({task.env for task in tasks})},
        "modalities": {
            kind: sum(task.modality == kind for task in tasks) for kind in sorted({task.modality for task in tasks})
        },
    }


def _count_split(train: Sequence[Task], evaluation: Sequence[Task]) -> dict[str, dict[str, int]]:
    return {
        env or "-": {
            "train": sum(task.env == env for task in train),
            "validation": sum(task.env == env for task in evaluation),
        }
        for env in sorted({task.env for task in [*train, *evaluation]})
    }


def _print_facts(facts: dict[str, Any], location: str) -> None:
    problems, warnings = facts["problems"], [f"warning: {warning}" for warning in facts["warnings"]]
    for lines in (problems, warnings):
        for line in lines[:SHOWN_PROBLEMS]:
            click.echo(f"fleetbus: {line}", err=True)
        if len(lines) > SHOWN_PROBLEMS:
            click.echo(f"fleetbus: and {len(lines) - SHOWN_PROBLEMS} more (--json shows all)", err=True)
    environments = ", ".join(f"{env} {count}" for env, count in facts["environments"].items())
    verdict = f"{len(problems)} problems" if problems else "valid"
    print(
        f"{redact_location(location)}: {verdict}, {facts['tasks']} tasks, "
        f"version {facts['dataset_version'] or '-'} ({environments})"
    )
    if facts["without_verifier"]:
        print(f"{facts['without_verifier']} tasks have no verifier: their environment must reward them itself")


def _print_table(facts: dict[str, Any]) -> None:
    width = max(len("environment"), *map(len, facts["environments"]))
    print(f"{'environment':<{width}}  {'train':>6}  {'validation':>10}")
    for env, row in facts["environments"].items():
        print(f"{env:<{width}}  {row['train']:>6}  {row['validation']:>10}")
    print(f"{'all':<{width}}  {facts['train']:>6}  {facts['validation']:>10}")
    print(f"wrote {', '.join(facts['files'])} from version {facts['dataset_version']}")
