"""Deployment plan of a configuration: streams, and processes with command line, log file and environment variables."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetbus.auth.folder import AuthFolder
from fleetbus.bus.nats.server import SYNC_SECONDS
from fleetbus.bus.streams import RunPlan, plan_run
from fleetbus.config.fields import list_settings
from fleetbus.config.pools import list_pools
from fleetbus.config.run_folder import RunFolder
from fleetbus.config.seats import list_policies
from fleetbus.config.settings import Configuration
from fleetbus.python_process import build_module_command
from fleetbus.tasks.datasets import is_remote
from fleetbus_workers.up.placement import Placement
from fleetbus_workers.up.process import ProcessPlan
from fleetbus_workers.up.restarts import name_start
from fleetbus_workers.up.seat_workers import list_seat_workers
from fleetbus_workers.up.supervisor import Plan

STOP_LIMITS_SECONDS = {"learner": 4.0, "environment": 4.5, "inference": 5.0}
"""Who asks stops first, who answers last. Each has a time of its own: to drain (`DRAIN_SECONDS`), to close, and for the end of
its interpreter. A stop takes a second or two; 16 s with summary and server if everything hangs, longer only while the
learner writes a checkpoint."""

SERVER_STOP_SECONDS = 2.0
SERVER_GRACE_SECONDS = 1.0
"""nats-server runs in a session of its own, out of reach of our signals: its holder must get to stop it."""

DRAIN_SECONDS = 1.5
"""What a worker under `up` gets to finish what it has; then it hands back."""

SHARED_STOP_SECONDS = 3600
"""What processes that share a model get to stop, before their launcher kills them: the supervisor decides, and earlier."""

RoleCommand = Callable[[str, str], Sequence[str]]
"""The command line of a role process, for its role and name; tests put scripted processes here."""


LocalRoles = Mapping[str, Callable[[str, str], Plan]]
"""By role: the plan of a worker that runs in this process, for its name and the URL of the server."""


def build_stream_plan(configuration: Configuration) -> RunPlan:
    """The streams and consumers of the run."""
    run, nats = configuration.run, configuration.nats
    return plan_run(
        run.name,
        pools=list_pools(run),
        policies=list_policies(run),
        lanes=nats.lanes,
        max_bytes=nats.max_bytes,
        replicas=nats.replicas,
    )


def build_role_command(configuration_file: Path) -> RoleCommand:
    """The real one: this interpreter, the role's own command."""

    def command(role: str, name: str) -> Sequence[str]:
        settings = ["--config", str(configuration_file), "--name", name]
        return build_module_command("fleetbus_workers.cli", role, *settings, "--supervised")

    return command


def replace_interpreter(python: str, command: RoleCommand) -> RoleCommand:
    """The same command lines for another interpreter: an engine may need an environment of its own."""
    return lambda role, name: [python, *command(role, name)[1:]]


def add_options(options: Sequence[str], command: RoleCommand) -> RoleCommand:
    """The same command lines with further options."""
    return lambda role, name: [*command(role, name), *options]


def share_model(processes: int, command: RoleCommand) -> RoleCommand:
    """The same command line in several processes that share a model; when one dies, all end and are started again."""

    def launch(role: str, name: str) -> Sequence[str]:
        python, *options = command(role, name)
        module = options.index("-m")
        settings = ["--standalone", "--nproc-per-node", str(processes), "--shutdown-timeout", str(SHARED_STOP_SECONDS)]
        launcher = ["-m", "torch.distributed.run", *settings]
        return [python, *options[:module], *launcher, "-m", "--", *options[module + 1 :]]

    return launch


def build_role_plans(
    configuration: Configuration,
    folder: RunFolder,
    url: str,
    variables: Mapping[str, str],
    command: RoleCommand,
    local: LocalRoles | None = None,
    placement: Placement | None = None,
) -> list[Plan]:
    """The learner, the environment workers and the inference workers: processes, except the roles that are ``local``; then
    those of the policies of seats."""
    placement = placement or Placement()
    local = local or {}
    commands = dict.fromkeys(STOP_LIMITS_SECONDS, command)
    if configuration.inference.python:
        commands["inference"] = replace_interpreter(configuration.inference.python, command)
    if placement.processes > 1:
        commands["learner"] = share_model(placement.processes, command)
    counted = (
        ("learner", 1, configuration.learner.threads),
        ("environment", configuration.environment.workers, 1),
        ("inference", configuration.inference.workers, configuration.inference.threads),
    )
    return [
        local[role](_format_worker_name(role, index, count), url)
        if role in local
        else ProcessPlan(
            name=_format_worker_name(role, index, count),
            stop_limit_seconds=STOP_LIMITS_SECONDS[role],
            command=_number_starts(commands[role], role, _format_worker_name(role, index, count)),
            log=folder.logs / f"{_format_worker_name(role, index, count)}.log",
            environment=build_role_variables(configuration, url, variables, threads) | placement.get_variables(role, index),
            output=(folder.checkpoints, folder.model) if role == "learner" else (),
        )
        for role, count, threads in counted
        for index in range(count)
    ] + [
        ProcessPlan(
            name=worker.name,
            stop_limit_seconds=STOP_LIMITS_SECONDS[worker.role],
            command=_number_starts(add_options(worker.options, commands[worker.role]), worker.role, worker.name),
            log=folder.logs / f"{worker.name}.log",
            environment=build_role_variables(configuration, url, variables, worker.threads)
            | placement.get_variables(worker.role, worker.index),
            output=worker.output,
        )
        for worker in list_seat_workers(configuration)
    ]


def build_server_plan(
    folder: RunFolder, port: Callable[[], int], variables: Mapping[str, str], auth: str = "", sync_seconds: float = SYNC_SECONDS
) -> ProcessPlan:
    """The process that holds the run's own server; ``port`` is asked at each start, so that it can stay the same. ``auth`` is
    the folder whose configuration it gets; empty: none."""
    config = [str(AuthFolder(Path(auth)).server_config)] if auth else []

    def command(_start: int) -> Sequence[str]:
        settings = [str(folder.store), str(port()), str(folder.server), str(sync_seconds), *config]
        return build_module_command("fleetbus_workers.up.server", *settings)

    return ProcessPlan(
        name="server",
        stop_limit_seconds=SERVER_STOP_SECONDS,
        grace_seconds=SERVER_GRACE_SECONDS,
        command=command,
        log=folder.logs / "server.log",
        environment=variables,
    )


def build_role_variables(configuration: Configuration, url: str, variables: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of a role process. Settings come from the file alone, except what must not stand in a file (the
    addresses of the server and of the tasks may hold a password) and what `up` decides."""
    settings = {setting.variable for setting in list_settings()}
    kept = {name: value for name, value in variables.items() if name not in settings}
    drain = min(configuration.limits.drain, DRAIN_SECONDS)
    decided = {"FLEETBUS_NATS_URL": url, "FLEETBUS_LIMITS_DRAIN": str(drain)}
    if is_remote(configuration.run.tasks):
        decided["FLEETBUS_RUN_TASKS"] = configuration.run.tasks
    # Roles share the cores: a thread that waits for the others of its product must not keep one busy meanwhile.
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", **kept, **decided}


def _format_worker_name(role: str, index: int, count: int) -> str:
    return role if count == 1 else f"{role}-{index}"


def _number_starts(command: RoleCommand, role: str, name: str) -> Callable[[int], Sequence[str]]:
    return lambda start: command(role, name_start(name, start))
