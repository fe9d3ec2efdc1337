"""A model folder or a tasks file that cannot work is refused before anything starts, in one line and within 3 s."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbus.config.load import LoadedConfiguration, dump_configuration
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import (
    Configuration,
    EpisodeSettings,
    InferenceSettings,
    LearnerSettings,
    RunSettings,
    TinkerSettings,
)
from fleetbus.errors import UserError
from fleetbus.tasks.files import check_verifiers, load_tasks
from fleetbus_schemas import Task
from fleetbus_workers.assembly.model import find_starter_folder
from fleetbus_workers.up.command import check_run
from fleetbus_workers.up.model_checks import check_model_contents
from fleetbus_workers.up.model_limits import fit_evaluation, fit_limits
from fleetbus_workers.up.service_checks import check_environment_servers, check_services


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(find_starter_folder(), folder)
    return folder


def change_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def remove_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    told = json.loads(file.read_text())
    told.pop("chat_template", None)
    file.write_text(json.dumps(told))


def write_template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def find_weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def cut_weights(folder: Path) -> None:
    file = find_weights(folder)
    file.write_bytes(file.read_bytes()[:-1000])


def overwrite_header(folder: Path) -> None:
    file = find_weights(folder)
    file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])


def put_nan(folder: Path) -> None:
    file = find_weights(folder)
    content = bytearray(file.read_bytes())
    content[-4:] = struct.pack("<f", float("nan"))
    file.write_bytes(bytes(content))


def name_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-00002-of-00002.safetensors"}}))


def test_the_starter_policy_passes(model: Path) -> None:
    check_model_contents(model)


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (remove_template, "has no chat template"),
        (write_template("{% for m in messages %}{{ m.content }"), "the chat template is broken in line 1"),
        (write_template("{{ messages[0].nothing.at_all }}"), "the chat template does not render: UndefinedError"),
        (change_config(model_type="no_such_kind"), "knows no model_type 'no_such_kind'"),
        (change_config(model_type="mamba"), "mamba has no attention"),
        (change_config(model_type=None), "names no model_type"),
        (change_config(vocab_size=77), "vocab_size 77, and the weights have 512 embeddings"),
        (lambda folder: (folder / "config.json").write_text("{") and None, "cannot be read as JSON"),
        (cut_weights, "is cut short"),
        (overwrite_header, "is no safetensors file"),
        (put_nan, "holds NaN or infinite weights"),
        (name_missing_shard, "lacks weights that its index names: model-00002-of-00002.safetensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_cannot_work_is_refused_in_one_line_at_once(
    model: Path, breaks: Callable[[Path], None], words: str
) -> None:
    breaks(model)
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        check_model_contents(model)
    assert words in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert time.monotonic() - began < 3


def test_limits_follow_the_model_where_the_user_set_none(model: Path) -> None:
    change_config(max_position_embeddings=4096)(model)
    configuration = Configuration(run=RunSettings(model=str(model)))
    fitted = fit_limits(configuration, {})
    assert (fitted.inference.max_model_len, fitted.episode.max_episode_tokens) == (4096, 4096)
    change_config(max_position_embeddings=1 << 20)(model)
    assert fit_limits(configuration, {}).inference.max_model_len == 8192
    assert fit_limits(Configuration(), {}) == Configuration()


def test_limits_that_the_user_set_stay(model: Path) -> None:
    change_config(max_position_embeddings=4096)(model)
    configuration = Configuration(
        run=RunSettings(model=str(model)),
        inference=InferenceSettings(max_model_len=2000),
        episode=EpisodeSettings(max_episode_tokens=1500),
    )
    both = {"inference.max_model_len": "--inference-max-model-len", "episode.max_episode_tokens": "fleetbus.toml"}
    assert fit_limits(configuration, both) == configuration
    assert fit_limits(configuration, {"inference.max_model_len": ""}).episode.max_episode_tokens == 2000


def test_own_tasks_of_the_starter_policy_get_all_that_it_takes() -> None:
    fitted = fit_limits(Configuration(run=RunSettings(environment="my_game:MyGame")), {})
    assert fitted.inference.max_model_len == fitted.episode.max_episode_tokens == 2048


def test_evaluations_are_as_large_as_the_run_deserves() -> None:
    def count(steps: int, **given: str) -> int:
        return fit_evaluation(Configuration(learner=LearnerSettings(steps=steps)), given).evaluation.episodes

    assert count(80) == 256
    assert count(3) == 38
    assert count(1) == 32
    assert count(3, **{"evaluation.episodes": "--evaluation-episodes"}) == 256


@pytest.mark.parametrize(("resumed", "fresh"), [(True, False), (True, True), (False, False)])
def test_a_resumed_run_goes_on_with_what_it_began_with(tmp_path: Path, resumed: bool, fresh: bool) -> None:
    run = RunSettings(folder=str(tmp_path))
    before = Configuration(run=run, learner=LearnerSettings(stale_groups="keep", steps=3))
    if resumed:
        run_folder(run).path.mkdir()
        run_folder(run).configuration.write_bytes(dump_configuration(before))
    found, _ = check_run(LoadedConfiguration(configuration=before, given={}), fresh=fresh)
    fitted = (found.learner.stale_groups, found.evaluation.episodes)
    assert fitted == ("keep", 256 if resumed and not fresh else 38)


def test_an_unknown_modality_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([{"key": "a", "prompt": "p", "task_modality": "telepathy"}]))
    with pytest.raises(UserError, match="task_modality is 'telepathy'; it must be one of tool_use, computer_use, browser_use"):
        load_tasks(file)


@pytest.mark.parametrize(
    ("code", "is_callable"),
    [
        ("def verify(env): return 1.0", True),
        ("async def anything(env): return 1.0", True),
        ("if True:\n  def verify(env): return 1.0", True),
        ("check = lambda env: 1.0\nverify = check", True),
        ("grade = lambda env: 1.0", True),
        ("x = 1", False),
        ("class A:\n  def verify(self): pass", False),
        ("def one(): pass\ndef two(): pass", False),
    ],
)
def test_a_verifier_without_a_function_to_call_is_a_problem(code: str, is_callable: bool) -> None:
    problems = check_verifiers([Task(key="t", verifier=code)])
    assert bool(problems) is not is_callable
    if problems:
        assert "its verifier must define verify()" in problems[0]


def test_services_that_nobody_answers_for_are_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = InferenceSettings(engine="openai", urls="http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"inference.urls: nothing answers at http://127.0.0.1:1"):
        check_services(Configuration(inference=servers))
    tinker = Configuration(inference=InferenceSettings(engine="tinker"), tinker=TinkerSettings(url="http://127.0.0.1:1"))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(UserError, match="TINKER_API_KEY is not set"):
        check_services(tinker)
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    with pytest.raises(UserError, match=r"tinker.url: nothing answers"):
        check_services(tinker)


@pytest.mark.parametrize("name", ["openenv", "nemo-gym", "http", "remote-gym"])
def test_an_environment_whose_servers_all_listen_nowhere_is_refused_before_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = "http://127.0.0.1:1"
    with pytest.raises(UserError, match=f"environment {name}: nothing answers at {dead}: Connection refused; start its server"):
        check_environment_servers(f"{name}:{dead}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        alive = f"http://127.0.0.1:{listening.getsockname()[1]}"
        check_environment_servers(f"{name}:{dead},{alive}" if name in ("http", "remote-gym") else f"{name}:{alive}")
    check_environment_servers("warehouse")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:2")
    check_environment_servers(f"{name}:http://elsewhere.example:1")  # a proxy may reach what this machine does not
