"""Everything that can be wrong with what a user asks of `up`, found before anything is started. Raises `UserError`."""

import importlib.util
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fleetbus.auth.access import build_access, is_credentials
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.server_config import WRITTEN_BY, parse_policies, parse_runs, run_accounts
from fleetbus.auth.stores import check_store
from fleetbus.config.check import check_trained_distribution
from fleetbus.config.engines import ENGINES, is_frozen, list_engines
from fleetbus.config.load import strip_credentials
from fleetbus.config.pools import find_pool, list_served_pools, parse_pools
from fleetbus.config.run_folder import run_folder
from fleetbus.config.seats import check_learner, list_policies, parse_seats
from fleetbus.config.settings import Configuration, EnvironmentSettings, NatsSettings
from fleetbus.errors import UserError
from fleetbus.tasks.files import check_verifiers, load_dataset
from fleetbus_schemas import Task
from fleetbus_workers.assembly.engines import check_packages
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.assembly.vision import check_vision
from fleetbus_workers.environment.examples import read_examples
from fleetbus_workers.environment.keyed_specs import build_keyed_factory, check_tasks_are_served, parse_keyed_specs
from fleetbus_workers.environment.specs import build_environment_factory, find_adapter, is_own_class
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.judge.opening import check_judge
from fleetbus_workers.up.model_checks import check_model_contents
from fleetbus_workers.up.placement import find_gpus, place_roles
from fleetbus_workers.up.seat_workers import check_seat_names
from fleetbus_workers.up.service_checks import check_environment_servers, check_services

CONNECT_SECONDS = 10.0
"""For an inference server or a Tinker service to take a connection."""

PYTHON_SECONDS = 60.0
DEFAULT_PORT = 4222
WEB_PORTS = {"ws": 80, "wss": 443}
LOCAL_PACKAGES = ("mcp", "numpy", "tokenizers", "transformers")
"""What the three roles import, with every engine and trainer; `up` runs all of them."""

TRAINER_PACKAGES = {"torch": ("safetensors", "torch"), "tinker": ("tinker",)}


def check_everything(
    configuration: Configuration, *, local_environment: bool = False, fresh: bool = False, plays: bool = True
) -> None:
    """Raise `UserError` for the first thing that would keep the run from working. ``local_environment``: the environment is
    an object of the caller's, who has checked it. ``fresh``: what the run has so far is to be removed. ``plays``: an episode
    of a class of the user's own is played first, for a second at most."""
    run, nats = configuration.run, configuration.nats
    check_trained_distribution(configuration.episode)
    check_installed(configuration)
    check_engine(configuration)
    check_algorithm(configuration)
    check_policies_of_seats(configuration)
    place_roles(configuration, find_gpus(os.environ))
    check_writable(Path(run.folder))
    if run.model:
        check_model(Path(run.model))
        check_model_contents(Path(run.model), engine=configuration.inference.engine)
    if configuration.environment.prompt == "template":
        check_tools(configuration)
    check_images(configuration)
    read_examples(configuration.environment.examples)
    if not local_environment:
        python = configuration.environment.python
        check_environment(run.environment, run.tasks, configuration if plays else None, select_served(configuration), python)
    if nats.auth:
        check_access(nats.auth, configuration.run.name)
        if not nats.url and is_credentials(nats.auth):
            raise UserError(f"--nats-auth {nats.auth} holds credentials for a server of others: say which with --nats")
        if not nats.url or not is_credentials(nats.auth):
            check_rights(configuration)
    if nats.url:
        from fleetbus.bus.nats.server_context import resolve_url  # nats-py, which `--help` does without

        check_server_answers(resolve_url(nats.url))
    else:
        check_server_program()
        check_port_free(nats.port)
        if not fresh:
            check_store(run_folder(run).store, run.name, keys=bool(nats.auth))


def check_installed(configuration: Configuration) -> None:
    """The packages of all roles and of the trainer, found but not imported; those of the engine are `check_engine`'s."""
    trainer = configuration.learner.trainer
    wanted = (*LOCAL_PACKAGES, *TRAINER_PACKAGES[trainer])
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    if missing:
        extra = "local" if trainer == "torch" else "server,environment,tinker"
        raise UserError(f"{', '.join(missing)} not installed: pip install 'fleetbus[{extra}]'")


def check_algorithm(configuration: Configuration) -> None:
    """Functions and a teacher that the algorithm names, and a judge."""
    algorithm = configuration.algorithm
    if algorithm.loss or algorithm.advantage:
        from fleetbus_workers.learner.hooks import check_hooks

        check_hooks(algorithm)
    check_judge(configuration.reward)
    if algorithm.teacher and not (Path(algorithm.teacher) / "config.json").is_file():
        raise UserError(f"algorithm.teacher = {algorithm.teacher}: no model folder is there")


def check_policies_of_seats(configuration: Configuration) -> None:
    """Models of seats, and learners for those that are trained."""
    run, inference = configuration.run, configuration.inference
    if configuration.learner.requested_by:
        raise UserError("learner.requested_by: `up` sets it for the learners of seats (--seat SEAT=train); leave it out")
    check_learner(configuration)
    seats = parse_seats(run.seats)
    check_seat_names(seats)
    for seat in seats:
        if (seat.trained or seat.league) and not ENGINES[inference.engine].is_local:
            does = "trains" if seat.trained else "lets versions of the policy play"
            raise UserError(
                f"run.seats {does} the seat {seat.seat}, and inference.engine = {inference.engine} has one policy's weights: "
                f"choose {' or '.join(list_engines(lambda kind: kind.is_local))}, or start the roles by hand, each policy's "
                "with servers of its own"
            )
        if seat.model and Path(seat.model) != Path(run.model):
            check_model(Path(seat.model))
            check_model_contents(Path(seat.model), engine=inference.engine)


def check_engine(configuration: Configuration) -> None:
    """Check that what the engine needs is found (not imported) by the Python that will run it."""
    inference = configuration.inference
    if inference.purpose != "train":
        raise UserError("inference.purpose = evaluate: `up` trains; leave it out, or start `fleetbus inference` separately")
    if is_frozen(inference):
        raise UserError(
            "`up` trains what its inference workers serve, and inference.frozen or the engine chat serves a model as it is: "
            "give that to a seat (run.seats)"
        )
    if inference.engine == "openai" and not inference.urls:
        raise UserError("inference.engine = openai needs inference.urls: base URLs of servers, separated by commas")
    if (inference.engine == "tinker") != (configuration.learner.trainer == "tinker"):
        raise UserError(
            "the weights of a Tinker service stay on the service: set both inference.engine and learner.trainer to tinker"
        )
    if inference.engine == "tinker" and configuration.weights.full_every != 1:
        raise UserError("a Tinker service publishes names, not weights: leave out weights.full_every")
    check_services(configuration)
    if not inference.python:
        check_packages(inference.engine)
        return
    wanted = ("fleetbus_workers", *ENGINES[inference.engine].packages)
    code = f"import importlib.util as u, sys; print(*(p for p in {wanted!r} if u.find_spec(p) is None))"
    try:
        found = subprocess.run(
            [inference.python, "-c", code], capture_output=True, text=True, timeout=PYTHON_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"inference.python = {inference.python} cannot be run: {error}") from error
    if found.returncode or found.stdout.strip():
        missing = ", ".join(found.stdout.split()).replace("fleetbus_workers", "fleetbus") or found.stderr.strip()[-200:]
        raise UserError(f"{inference.python} lacks {missing}: install fleetbus and the extra {inference.engine} there")


def check_writable(folder: Path, *, flag: str = "--run-folder") -> None:
    """The folder that ``flag`` names, or the nearest one above it that exists, takes new files."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"cannot write below {existing} ({error.strerror}): choose another folder with {flag}") from error


def check_model(folder: Path) -> None:
    """A Hugging Face model folder: configuration, weights as safetensors, tokenizer."""
    if not folder.is_dir():
        raise UserError(
            f"no model folder {folder}: --model takes a folder that transformers' from_pretrained loads, or the id of a model "
            "on the Hugging Face Hub, as in Qwen/Qwen3-0.6B"
        )
    missing = [
        what
        for what, found in (
            ("config.json", (folder / "config.json").is_file()),
            ("weights (*.safetensors)", any(folder.glob("*.safetensors"))),
            ("tokenizer.json", (folder / "tokenizer.json").is_file()),
        )
        if not found
    ]
    if missing:
        raise UserError(f"the model folder {folder} lacks {', '.join(missing)}")


def check_tools(configuration: Configuration) -> None:
    """A chat template that can describe tools and write calls and results, as environment.prompt = template asks for."""
    _ = ChatTemplate(find_model_folder(configuration.run)).tools


def check_images(configuration: Configuration) -> None:
    """Tasks that load, from wherever they are, and nothing that shows images to who reads text only."""
    check_vision(configuration, load_dataset(configuration.run.tasks) if configuration.run.tasks else ())


def select_served(configuration: Configuration) -> Callable[[Task], bool]:
    """True for a task of the pools that the workers of a configuration serve: others play the rest."""
    pools, served = parse_pools(configuration.run.pool), list_served_pools(configuration)
    return lambda task: find_pool(pools, task.env) in served


def check_environment(
    specs: str,
    tasks: str = "",
    played: Configuration | None = None,
    is_served: Callable[[Task], bool] = lambda _: True,
    python: str = "",
) -> None:
    """SPECs that resolve and serve every task of the file, or those that ship, but for tasks that workers elsewhere serve; the
    environments are opened by the workers. With ``played`` settings, classes of the user's own play a task first. ``python``:
    the interpreter of other packages."""
    if specs == "warehouse":  # ours, and checking it would import all of mcp before the first line is shown
        return
    from fleetbus_workers.environment.adapters.warehouse.tasks import (
        build_warehouse_task,  # imports structlog, which help does without
    )

    resolved = Configuration(environment=EnvironmentSettings(python=python))
    build_keyed_factory(specs, lambda spec: build_environment_factory(spec, verifier=_NoGrader(), configuration=resolved))
    for spec in parse_keyed_specs(specs).values():
        if find_adapter(spec).build.startswith("foreign."):
            from fleetbus_workers.environment.adapters.foreign.factory import check_package  # needs packages of an extra

            check_package(spec, python)
        if find_adapter(spec).name == "ors":
            from fleetbus_workers.environment.adapters.ors.tasks import check_server

            check_server(spec)
    dataset = load_dataset(tasks) if tasks else [build_warehouse_task(0)]
    check_tasks_are_served(parse_keyed_specs(specs), [task for task in dataset if is_served(task)])
    for spec in parse_keyed_specs(specs).values():
        check_environment_servers(spec)
    if tasks:
        if problems := check_verifiers(dataset):
            raise UserError(f"{problems[0]}{f' (and {len(problems) - 1} other problems)' if problems[1:] else ''}")
        if played is not None:
            _play_own_classes(parse_keyed_specs(specs), dataset, played)


def _play_own_classes(specs: Mapping[str, str], tasks: Sequence[Task], configuration: Configuration) -> None:
    from fleetbus_workers.environment.check.quick import check_quickly

    for key, spec in specs.items():
        task = next((task for task in tasks if task.env == key or (not key and task.env not in specs)), None)
        if task is not None and is_own_class(spec):
            factory = build_environment_factory(spec, verifier=_NoGrader(), configuration=configuration)
            check_quickly(factory, spec, task, configuration)


class _NoGrader:
    """Stands in for the grader of a factory that never makes an environment."""

    async def verify(self, *_: object, **__: Any) -> Any:
        raise NotImplementedError


def check_access(folder: str, run: str) -> None:
    """The keys of all roles."""
    for role in ("up", "environment", "inference", "learner"):
        build_access(role, folder, run)


def check_rights(configuration: Configuration) -> None:
    """The configuration of the server that we start is there and, if `fleetbus auth init` wrote it, allows this run. That of a
    server which runs allows the policies of this run, if it is there: without, workers are refused once a turn is late."""
    from fleetbus_workers.up.process_plans import build_stream_plan

    run, nats = configuration.run, configuration.nats
    folder = AuthFolder(Path(nats.auth))
    config = folder.server_config
    if not config.is_file() and nats.url:
        return
    if not config.is_file():
        raise UserError(f"no configuration for the server at {config}: write it with `fleetbus auth init {nats.auth}`")
    text = config.read_text(encoding="utf-8")
    if not text.startswith(WRITTEN_BY):
        return
    known = parse_policies(text)
    missing = [policy for policy in list_policies(run) if policy not in known]
    if nats.url and (run.name not in parse_runs(text) or not missing):
        return
    if run.name in parse_runs(text) and run_accounts(folder.access(build_stream_plan(configuration))) in text:
        return
    flags = [f"--run {name}" for name in dict.fromkeys((*parse_runs(text), run.name))]
    flags += [f"--policy {policy}" for policy in (*known, *missing) if (*known, *missing) != ("default",)]
    flags += [f"--lanes {nats.lanes}"] * (nats.lanes != NatsSettings().lanes)
    lacks = f"run {run.name}"
    if missing and run.name in parse_runs(text):
        lacks = f"{'policy' if len(missing) == 1 else 'policies'} {', '.join(missing)} in {lacks}"
    raise UserError(f"{config} does not allow {lacks}: fleetbus auth init {nats.auth} {' '.join(flags)}")


def check_server_program() -> None:
    """A nats-server that can be started."""
    from fleetbus.bus.nats.server import find_server

    find_server()


def check_port_free(port: int) -> None:
    """Check that ``port`` is free on this machine; 0 always is."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror}): choose another with --nats-port, or none for a free one"
            ) from error


def check_server_answers(url: str) -> None:
    """At least one server of a URL list answers as NATS does."""
    reasons = [reason for each in url.split(",") if (reason := _probe_server(each.strip()))]
    if len(reasons) == len(url.split(",")):
        raise UserError(f"no NATS server at {strip_credentials(url)}: {reasons[0]}")


def _probe_server(url: str) -> str:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname or "", parts.port or WEB_PORTS.get(parts.scheme, DEFAULT_PORT)
    except ValueError:  # its text may quote a part of a password
        return "not a URL as nats://HOST:4222"
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
            if parts.scheme in ("ws", "wss") or connection.recv(5, socket.MSG_WAITALL) == b"INFO ":
                return ""
            return "something else answers there"
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "that is not a valid host name"
