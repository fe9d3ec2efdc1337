"""Harbor task folders: what is read, what is refused by name, and how rewards are read and combined."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbus.errors import UserError
from fleetbus.tasks.harbor import build_task, check_harbor, find_task, read_harbor_task
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapters.harbor.dockerfile import read_dockerfile
from fleetbus_workers.environment.adapters.harbor.grading import Grade, parse_json, resolve_variables
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.task_permissions import TaskPermissions

OURS = Path(__file__).parents[2] / "docs/examples/harbor"

STEP, STEP_FILES = "[[steps]]\nname = 'a'\n", {"steps__a__instruction_DOT_md": "A"}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a task folder: its task.toml, and further files."""

    def write(toml: str = "", name: str = "task", **files: str) -> Path:
        folder = tmp_path / name
        content = {
            "task.toml": toml,
            "instruction.md": "Do it.",
            "environment/Dockerfile": "FROM python:3.11-slim\n",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        } | {path.replace("__", "/").replace("_DOT_", "."): text for path, text in files.items()}
        for path, text in content.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return write


def problems(folder: Path) -> str:
    return "; ".join(check_harbor(f"harbor:{folder}")[1])


def test_our_tasks_are_read_with_what_they_inherit() -> None:
    tasks, wrong = check_harbor(f"harbor:{OURS}")
    assert [task.key for task in tasks] == ["log-report", "repair-inventory", "roman-numerals"] and wrong == []
    steps = read_harbor_task(OURS / "log-report").steps
    assert [(step.name, step.min_reward, step.agent.timeout_sec, step.verifier.timeout_sec) for step in steps] == [
        ("extract", {"reward": 1.0}, 600.0, 60.0),
        ("summarize", {}, 600.0, 60.0),
    ]
    separate = read_harbor_task(OURS / "roman-numerals").steps[0]
    assert separate.separate and separate.artifacts == ("/app/roman.py",)


@pytest.mark.parametrize(
    ("toml", "files", "words"),
    [
        ("", {"environment__docker-compose_DOT_yaml": "x"}, "docker-compose.yaml: compose is not supported"),
        ("[environment]\nnetwork_mode = 'allowlist'", {}, "network_mode = 'allowlist' is not supported"),
        ("[environment]\nos = 'windows'", {}, "os = 'windows' is not supported"),
        ("[environment]\ngpus = 1", {}, "gpus and tpu are not supported"),
        ("[environment]\nskills_dir = '/s'", {}, "skills_dir is not supported"),
        ("[[environment.mcp_servers]]\nname = 'm'\nurl = 'http://m'", {}, "mcp_servers]] (m) are not supported"),
        ("[agent]\nnetwork_mode = 'no-network'", {}, "differs from the environment's: not supported"),
        ("[agent]\nnetwork_mode = 'no-network'\n" + STEP, STEP_FILES, "[agent] network_mode = 'no-network' differs"),
        ("[verifier]\nnetwork_mode = 'no-network'\n" + STEP, STEP_FILES, "[verifier] network_mode = 'no-network' differs"),
        ("[environment]\nallowed_hosts = ['pypi.org']", {}, "[environment] allowed_hosts is not supported"),
        ("[agent]\nallowed_hosts = ['pypi.org']\n" + STEP, STEP_FILES, "[agent] allowed_hosts is not supported"),
        ("[verifier]\nallowed_hosts = ['pypi.org']", {}, "[verifier] allowed_hosts is not supported"),
        ("[environment]\nmemory = '2 gigabytes'", {}, "memory = '2 gigabytes': write memory_mb = MEGABYTES"),
        ("[environment]\nstorage = 10", {}, "storage = 10: write storage_mb = MEGABYTES"),
        ("[[verifier.collect]]\ncommand = 'x'", {}, "[[verifier.collect]] is not supported"),
        ("[[verifier.collect]]\ncommand = 'x'\n" + STEP, STEP_FILES, "[[verifier.collect]] is not supported"),
        ("artifacts = ['app/x']", {}, "must be an absolute path"),
        ("artifacts = ['/app/../etc']", {}, "must be an absolute path without .."),
        ("schema_version = '2.0'", {}, "1.0 to 1.4 are read"),
        ("[[steps]]\nname = '../x'", {}, "step '../x'"),
        ("[environment]\ncpus = 'many'", {}, "task.toml: Expected `float | null`"),
        ("[", {}, "task.toml: "),
        ("", {"instruction_DOT_md": " "}, "is empty; say what is to be done"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(write: Write, toml: str, files: dict[str, str], words: str) -> None:
    assert words in problems(write(toml, **files))


def test_earlier_ways_to_write_resources_are_read(write: Write) -> None:
    place = read_harbor_task(write("version = '1.0'\n[environment]\nmemory = '2G'\nallow_internet = false")).config.environment
    assert (place.memory_mb, place.network_mode) == (2048, "no-network")


def test_a_task_without_tests_or_image_is_refused(write: Write) -> None:
    folder = write()
    shutil.rmtree(folder / "tests")
    assert "there is no tests/test.sh: nothing would grade it" in problems(folder)
    folder = write(name="other")
    (folder / "environment/Dockerfile").unlink()
    assert "has neither environment/Dockerfile nor [environment] docker_image" in problems(folder)


def test_links_are_not_read(write: Write) -> None:
    folder = write()
    (folder / "tests/secret").symlink_to("/etc/passwd")
    assert "links and special files are not read" in problems(folder)


def test_a_task_names_no_path_and_its_files_may_not_differ(write: Write) -> None:
    folder = write()
    task = build_task(read_harbor_task(folder))
    assert find_task(f"harbor:{folder.parent}", task).folder == folder
    with pytest.raises(UserError, match="is no name of a Harbor folder"):
        find_task(f"harbor:{folder.parent}", Task(key="../task", config=task.config))
    with pytest.raises(UserError, match="has no task"):
        find_task(f"harbor:{folder.parent}", Task(key="other", config=task.config))
    (folder / "tests/test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    with pytest.raises(UserError, match="its files differ"):
        find_task(f"harbor:{folder.parent}", task)


def test_rewards_of_steps_are_combined_as_harbor_does(write: Write) -> None:
    steps = "[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\n"
    files = {"steps__a__instruction_DOT_md": "A", "steps__b__instruction_DOT_md": "B"}
    mean, final = write(steps, **files), write("multi_step_reward_strategy = 'final'\n" + steps, name="final", **files)
    assert read_harbor_task(mean).combine([1.0, 0.0]) == 0.5
    assert read_harbor_task(mean).combine([0.4]) == 0.4, "over the steps that were played"
    assert read_harbor_task(final).combine([1.0, 0.25]) == 0.25


@pytest.mark.parametrize(
    ("content", "reward"),
    [(b'{"reward": 0.5, "style": 1}', 0.5), (b'{"score": 1}', 1.0), (b"0.25", 0.25), (b'{"reward": true}', 1.0)],
)
def test_a_reward_file_of_numbers_is_read(content: bytes, reward: float) -> None:
    assert parse_json(content).reward == reward


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b'"1"', b'{"reward": "1"}', b'{"reward": NaN}', b'{"reward": 1e999}', b'{"a": 1, "b": 1}', b"[" * 9000],
)
def test_anything_else_in_it_is_no_verdict(content: bytes) -> None:
    grade = parse_json(content)
    assert grade.reward is None and grade.reason


def test_a_missing_reward_is_below_every_threshold() -> None:
    assert Grade(rewards={"reward": 0.5}).find_shortfall({"reward": 0.5}) == ""
    assert Grade(rewards={"reward": 0.5}).find_shortfall({"style": 0.0})
    assert Grade(rewards=None).find_shortfall({"reward": 0.0})


def test_variables_of_the_worker_are_sent_only_if_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    listed, none = TaskPermissions(variables=("OPENAI_API_KEY",)), TaskPermissions()
    assert resolve_variables({"K": "${OPENAI_API_KEY}", "A": "b"}, listed) == {"K": "sk-secret", "A": "b"}
    assert resolve_variables({"K": "${OPENAI_API_KEY:-none}"}, none) == {"K": "none"}
    with pytest.raises(EnvironmentFailed, match="--environment-task-variables does not list"):
        resolve_variables({"K": "${OPENAI_API_KEY}"}, none)


def test_a_dockerfile_of_files_and_commands_needs_no_image(tmp_path: Path) -> None:
    text = 'FROM x\nENV A=1 B="2 3"\nWORKDIR /app/src\nCOPY a.py \\\n  ./\nCOPY ["b", "/data/b"]\nRUN make it\nCMD ["sh"]\n'
    (tmp_path / "Dockerfile").write_text(text)
    build = read_dockerfile(tmp_path)
    assert build.variables == {"A": "1", "B": "2 3"} and build.workdir == "/app/src" and build.roots == ("/app", "/data")
    assert build.actions == (("copy", "a.py", "/app/src/"), ("copy", "b", "/data/b"), ("run", "make it", "/app/src"))


@pytest.mark.parametrize(
    "line",
    [
        "USER app",
        "COPY --from=x a /app/",
        "RUN --mount=type=bind x",
        "COPY ../x /app/",
        "COPY x /usr/lib/x",
        "COPY x /",
        "ADD u /app",
    ],
)
def test_what_needs_an_image_is_refused_without_docker(tmp_path: Path, line: str) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM x\n{line}\n")
    with pytest.raises(UserError, match=r"needs Docker|beside the Dockerfile"):
        read_dockerfile(tmp_path)
