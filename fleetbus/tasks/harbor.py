"""Harbor task folders, read as they are (task.toml 1.4, https://harborframework.com/docs/tasks), without importing harbor.

A folder has ``task.toml``, ``instruction.md``, `environment/`, `tests/test.sh` and `solution/solve.sh`; one with steps has the
instruction, tests and solution of each in `steps/NAME/`. A task travels as its name and the hash of its folder alone: a worker
finds the folder below the one that its own operator named, so no task chooses a path.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleetbus.errors import UserError
from fleetbus_schemas import MAX_INLINE_BYTES, Task

PREFIX = "harbor:"
ENVIRONMENT = "harbor"
MAX_FILE_BYTES, MAX_FILES = 64 << 20, 5000
VERIFIER_SECONDS = 600.0
"""How long tests may take where a task does not say."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")

Network = Literal["no-network", "public", "allowlist"]


class Healthcheck(msgspec.Struct, frozen=True, kw_only=True):
    """A command that has to succeed before the agent begins; times in seconds."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    """An MCP server whose address the agent gets."""

    name: str
    transport: str = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """``[environment]``: what a container is made of, and what it may use. ``cpus``, ``memory_mb``, ``storage_mb``: None: as
    the operator says."""

    docker_image: str | None = None
    build_timeout_sec: float = 600.0
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    network_mode: Network = "public"
    allowed_hosts: list[str] = []
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: Healthcheck | None = None
    mcp_servers: list[McpServer] = []
    skills_dir: str | None = None


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """``[agent]``: how long it may take, who it is, and its own network."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: Network | None = None
    allowed_hosts: list[str] = []


class VerifierRules(msgspec.Struct, frozen=True, kw_only=True):
    """``[verifier]``: with an ``environment`` of its own it is separate."""

    timeout_sec: float | None = None
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Place | None = None
    network_mode: Network | None = None
    allowed_hosts: list[str] = []
    collect: list[dict[str, Any]] = []

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        return self.environment_mode or ("separate" if self.environment is not None else None)


class StepRules(msgspec.Struct, frozen=True, kw_only=True):
    """One of ``[[steps]]``. Below ``min_reward`` (of ``reward``, or of each named reward) the steps after it are not played."""

    name: str
    agent: Agent = Agent()
    verifier: VerifierRules = VerifierRules()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | dict[str, Any]] = []


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class HarborConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``task.toml``; keys that have no meaning here are left alone, as harbor leaves them."""

    schema_version: str = "1.4"
    metadata: dict[str, Any] = {}
    environment: Place = Place()
    agent: Agent = Agent()
    verifier: VerifierRules = VerifierRules()
    solution: Solution = Solution()
    steps: list[StepRules] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[str | dict[str, Any]] = []


class HarborStep(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a task to be played, with everything that it inherits: a task without steps has one, called ``""``."""

    name: str
    instruction: str
    agent: Agent
    verifier: VerifierRules
    separate: bool
    min_reward: dict[str, float]
    tests: tuple[Path, ...]
    solution: Path | None
    workdir: Path | None
    healthcheck: Healthcheck | None
    artifacts: tuple[str, ...]


class HarborTask(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that was read. ``digest`` is of all its files."""

    folder: Path
    digest: str
    config: HarborConfig
    steps: tuple[HarborStep, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    def combine(self, rewards: list[float]) -> float:
        """The reward of the steps that were played, as harbor counts: their mean, or that of the last one."""
        if self.config.multi_step_reward_strategy == "final":
            return rewards[-1]
        return sum(rewards) / len(rewards)


def list_folders(location: str) -> list[Path]:
    """The task folders at ``harbor:DIR``: DIR itself, or those in it. Raises `UserError`."""
    root = Path(location.removeprefix(PREFIX)).expanduser()
    if (root / "task.toml").is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"{location}: there is no such folder; give a Harbor task or a folder of them")
    folders = sorted(each for each in root.iterdir() if (each / "task.toml").is_file())
    if not folders:
        raise UserError(f"{location}: no folder in it has a task.toml; give a Harbor task or a folder of them")
    return folders


def check_harbor(location: str) -> tuple[list[Task], list[str]]:
    """The tasks at ``harbor:DIR``, and one line for each thing that is wrong. Raises `UserError` if nothing is there."""
    tasks, problems = [], []
    for folder in list_folders(location):
        try:
            harbor = read_harbor_task(folder)
            problems += [f"{folder}: {problem}" for problem in find_unsupported(harbor)]
            tasks.append(build_task(harbor))
        except UserError as error:
            problems.append(str(error))
    return tasks, problems


def build_task(harbor: HarborTask) -> Task:
    """Build the message of a task: the name of the folder, its hash, and the first instruction."""
    prompt = harbor.steps[0].instruction
    if len(prompt.encode()) > MAX_INLINE_BYTES // 2:
        raise UserError(f"{harbor.folder}: the instruction is longer than {MAX_INLINE_BYTES // 2} bytes; shorten it")
    return Task(
        key=harbor.name, env=ENVIRONMENT, prompt=prompt, dataset_version=harbor.digest[:16], config={"digest": harbor.digest}
    )


def find_task(location: str, task: Task) -> HarborTask:
    """The folder of a task below ``harbor:DIR``. Raises `UserError` where there is none, or one that has changed."""
    if not _NAME.fullmatch(task.key):
        raise UserError(f"task {task.key!r} is no name of a Harbor folder")
    for folder in list_folders(location):
        if folder.name == task.key:
            harbor = read_harbor_task(folder)
            if harbor.digest != task.config.get("digest"):
                raise UserError(f"{folder} is not the task that the run was started with: its files differ")
            return harbor
    raise UserError(f"{location} has no task {task.key}")


def read_harbor_task(folder: Path) -> HarborTask:
    """A task folder. Raises `UserError` with one line that names the folder, the place and the remedy."""
    folder = folder.resolve()
    if not _NAME.fullmatch(folder.name):
        raise UserError(f"{folder}: the folder's name is the task's key: use letters, digits, dots and dashes")
    try:
        raw = tomllib.loads((folder / "task.toml").read_text())
        raw.setdefault("schema_version", raw.pop("version", "1.4"))
        config = msgspec.convert(_without_deprecated(folder, raw), HarborConfig)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise UserError(f"{folder}/task.toml: {error}") from None
    if not re.fullmatch(r"1\.[0-4]", config.schema_version):
        raise UserError(f"{folder}/task.toml: schema_version is {config.schema_version!r}; 1.0 to 1.4 are read")
    steps = tuple(_read_step(folder, config, rules) for rules in config.steps) or (_read_step(folder, config),)
    return HarborTask(folder=folder, digest=hash_files(folder), config=config, steps=steps)


def find_unsupported(harbor: HarborTask) -> list[str]:
    """Features that a task asks for and fleetbus lacks, each by its name."""
    config, found = harbor.config, []
    folders = [harbor.folder / "environment", *(tests for step in harbor.steps for tests in step.tests)]
    composed = [folder / name for folder in folders for name in _COMPOSE if (folder / name).exists()]
    found += [f"{file.relative_to(harbor.folder)}: compose is not supported" for file in composed]
    places = [("environment", config.environment), *_list_verifier_places(config)]
    for owner, place in places:
        found += [f"[{owner}] os = {place.os!r} is not supported"] if place.os.lower() != "linux" else []
        found += [f"[{owner}] gpus and tpu are not supported"] if place.gpus or place.tpu else []
        found += [f"[{owner}] network_mode = 'allowlist' is not supported"] if place.network_mode == "allowlist" else []
        found += [f"[{owner}] allowed_hosts is not supported"] if place.allowed_hosts else []
        found += [f"[{owner}] skills_dir is not supported"] if place.skills_dir else []
    if config.environment.mcp_servers:
        names = ", ".join(server.name for server in config.environment.mcp_servers)
        found.append(f"[[environment.mcp_servers]] ({names}) are not supported: the policy has a shell alone")
    for step in harbor.steps:
        network = config.environment.network_mode
        for owner, mode, hosts in (
            ("agent", step.agent.network_mode, step.agent.allowed_hosts),
            ("verifier", step.verifier.network_mode, step.verifier.allowed_hosts),
        ):
            if mode not in (None, network):
                found.append(f"[{owner}] network_mode = {mode!r} differs from the environment's: not supported")
            found += [f"[{owner}] allowed_hosts is not supported"] if hosts else []
        found += ["[[verifier.collect]] is not supported"] if step.verifier.collect else []
    if not config.environment.docker_image and not (harbor.folder / "environment/Dockerfile").is_file():
        found.append("has neither environment/Dockerfile nor [environment] docker_image")
    return list(dict.fromkeys(found))


def _list_verifier_places(config: HarborConfig) -> list[tuple[str, Place]]:
    owners = [("verifier", config.verifier), *((f"steps.{step.name}.verifier", step.verifier) for step in config.steps)]
    return [(f"{owner}.environment", rules.environment) for owner, rules in owners if rules.environment is not None]


def _without_deprecated(folder: Path, raw: dict[str, object]) -> dict[str, object]:
    """``memory = "2G"``, ``storage`` and ``allow_internet`` of earlier versions, as they are written now."""
    place = raw.get("environment")
    if isinstance(place, dict):
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            size = place.pop(old, None)
            found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG])", str(size).strip().upper())
            if found is not None:
                place.setdefault(new, int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2]]))
            elif size is not None:
                raise UserError(f"{folder}/task.toml: [environment] {old} = {size!r}: write {new} = MEGABYTES")
        if place.pop("allow_internet", None) is False:
            place.setdefault("network_mode", "no-network")
    return raw


def _read_step(folder: Path, config: HarborConfig, rules: StepRules | None = None) -> HarborStep:
    """One of the steps, or (None) the task as its only one."""
    if rules is not None and not _NAME.fullmatch(rules.name):
        raise UserError(f"{folder}/task.toml: step {rules.name!r}: use letters, digits, dots and dashes")
    own = folder / "steps" / rules.name if rules is not None else folder
    workdir = own / "workdir"
    step = rules or StepRules(name="")
    agent, verifier, task = step.agent, step.verifier, config.verifier
    threshold = step.min_reward
    return HarborStep(
        name=step.name,
        instruction=_read_instruction(own / "instruction.md"),
        agent=msgspec.structs.replace(
            agent,
            user=agent.user or config.agent.user,
            timeout_sec=agent.timeout_sec or config.agent.timeout_sec,
            network_mode=agent.network_mode or config.agent.network_mode,
            allowed_hosts=agent.allowed_hosts or config.agent.allowed_hosts,
        ),
        verifier=msgspec.structs.replace(
            verifier,
            timeout_sec=verifier.timeout_sec or task.timeout_sec or VERIFIER_SECONDS,
            env=task.env | verifier.env,
            user=verifier.user or task.user,
            environment=verifier.environment or task.environment,
            network_mode=verifier.network_mode or task.network_mode,
            allowed_hosts=verifier.allowed_hosts or task.allowed_hosts,
            collect=[*task.collect, *verifier.collect],
        ),
        separate=(verifier.mode or task.mode) == "separate",
        min_reward={"reward": threshold} if isinstance(threshold, int | float) else dict(threshold or {}),
        tests=_list_tests(folder, tuple(dict.fromkeys((folder / "tests", own / "tests")))),
        solution=_find_solution(own / "solution"),
        workdir=workdir if rules is not None and workdir.is_dir() else None,
        healthcheck=step.healthcheck,
        artifacts=_list_artifacts(folder, [*config.artifacts, *step.artifacts]),
    )


def _read_instruction(file: Path) -> str:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if not text.strip():
        raise UserError(f"{file}: is empty; say what is to be done")
    return text


def _list_tests(folder: Path, candidates: tuple[Path, ...]) -> tuple[Path, ...]:
    """Folders of tests, copied one over the other; one of them has to have a test.sh."""
    found = tuple(each for each in candidates if each.is_dir())
    if not any((each / "test.sh").is_file() for each in found):
        raise UserError(f"{folder}: there is no {candidates[-1].relative_to(folder)}/test.sh: nothing would grade it")
    return found


def _find_solution(folder: Path) -> Path | None:
    return folder if (folder / "solve.sh").is_file() else None


def _list_artifacts(folder: Path, entries: list[str | dict[str, object]]) -> tuple[str, ...]:
    """Paths in the agent's container that a separate verifier gets."""
    paths = []
    for entry in entries:
        path = entry if isinstance(entry, str) else str(entry.get("source", ""))
        if not path.startswith("/") or ".." in path.split("/"):
            raise UserError(f"{folder}/task.toml: artifact {path!r} must be an absolute path without ..")
        if isinstance(entry, dict) and entry.get("service") not in (None, "main"):
            raise UserError(f"{folder}/task.toml: artifact {path!r} is of another service: compose is not supported")
        paths.append(path)
    return tuple(paths)


def hash_files(folder: Path) -> str:
    """SHA-256 over names, modes and contents. Links are refused: they could lead out of the folder."""
    digest, count = hashlib.sha256(), 0
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*files, *(each for each in folders if os.path.islink(os.path.join(parent, each)))]):
            path = Path(parent, name)
            count += 1
            if path.is_symlink() or not path.is_file():
                raise UserError(f"{path}: links and special files are not read")
            if count > MAX_FILES or path.stat().st_size > MAX_FILE_BYTES:
                raise UserError(f"{path}: a task has at most {MAX_FILES} files of {MAX_FILE_BYTES >> 20} MiB")
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o111:o}\0{content}\n".encode())
    return digest.hexdigest()
