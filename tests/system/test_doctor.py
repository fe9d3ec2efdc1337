"""`fleetbus doctor`: what it finds, and what it makes of what is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetbus.bus.nats.server import run_server
from fleetbus.config.load import load_configuration
from fleetbus.errors import UserError
from fleetbus_workers.cli.look import diagnosis
from fleetbus_workers.cli.look.diagnosis import check_bus, check_disk, check_memory, check_packages, check_run_folder, diagnose
from fleetbus_workers.cli.look.model_diagnosis import diagnose_model
from fleetbus_workers.starter.build import find_starter_folder
from fleetbus_workers.up.checks import check_everything
from tests.support.template_folders import write_template_folder

pytestmark = pytest.mark.integration


def test_here_it_finds_all_that_up_needs(tmp_path: Path) -> None:
    configuration = load_configuration(flags={"run.folder": str(tmp_path)}).configuration
    findings = {finding.name: finding for finding in diagnose(configuration)}
    assert [name for name, finding in findings.items() if finding.state == "failed"] == []
    assert findings["nats-server"].detail.startswith("nats-server: v2.")
    assert findings["a server of our own"].detail == "answers"
    assert {"python", "torch build", "sandbox", "cores", "memory", "disk", "run folder", "clock skew"} <= set(findings)


def test_json_tells_whether_the_machine_is_ready_as_the_exit_code_does(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fleetbus_workers.cli", "doctor", "--json", "--nats", "nats://127.0.0.1:1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    answer = json.loads(result.stdout)
    assert result.returncode == 1 and answer["ready"] is False
    (failed,) = [finding for finding in answer["findings"] if finding["state"] == "failed"]
    assert failed["name"] == "server at nats://127.0.0.1:1"


def test_what_is_missing_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = diagnosis._read_version
    monkeypatch.setattr(diagnosis, "_read_version", lambda package: None if package in ("mcp", "matplotlib") else real(package))
    findings = {finding.name: finding for finding in check_packages()}
    assert findings["fleetbus[environment]"].state == "failed"
    assert findings["fleetbus[environment]"].detail == "missing mcp: pip install 'fleetbus[environment]'"
    assert findings["fleetbus[plot]"].state == "warning"
    assert findings["fleetbus[torch]"].state == "ok"


def test_a_folder_that_takes_no_files_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_run_folder(tmp_path / "new" / "runs").state == "ok"
    assert check_run_folder(tmp_path / "file" / "runs").state == "failed"


def test_little_memory_or_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(diagnosis, "MINIMUM_MEMORY_BYTES", 1 << 60)
    monkeypatch.setattr(diagnosis, "MINIMUM_DISK_BYTES", 1 << 60)
    assert (check_memory().state, check_disk(tmp_path).state) == ("warning", "warning")


@pytest.mark.parametrize(("skew", "state"), [(0.0, "ok"), (5.0, "warning"), (-5.0, "warning")])
async def test_clocks_that_disagree_by_more_than_a_second_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, skew: float, state: str
) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(skew * 1e9))
    findings = {finding.name: finding for finding in await check_bus("", "default")}
    assert findings["clock skew"].state == state


async def test_without_a_stream_of_the_run_the_servers_clock_is_not_known(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        findings = {finding.name: finding for finding in await check_bus(server.url, "r9")}
    assert findings[f"server at {server.url}"].detail == "answers"
    assert findings["clock skew"].detail == "not known before `fleetbus init --run r9`"


TEMPLATES = Path(__file__).parents[1] / "unit" / "chat_templates"


def test_a_model_folder_s_template_is_recognised_and_its_three_turns_are_shown(tmp_path: Path) -> None:
    folder = write_template_folder(tmp_path / "model", (TEMPLATES / "qwen3.jinja").read_text())
    result = subprocess.run(
        [sys.executable, "-m", "fleetbus_workers.cli", "doctor", "--model", str(folder), "--json", "--nats", "nats://127.0.0.1:1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    answer = json.loads(result.stdout)
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert found["chat template"]["detail"] == "three turns proved without tools; a turn ends with <|im_end|>"
    assert found["reasoning"]["detail"] == "between <think> and </think>; the template leaves it out of earlier turns"
    assert found["tools"]["detail"].startswith("format hermes (Hermes, Qwen2.5, Qwen3")
    assert answer["conversation"].count("<tool_call>\n{") == 5
    assert answer["conversation"].count("<|im_start|>assistant") == 3


@pytest.mark.parametrize(("prompt", "state"), [("auto", "warning"), ("template", "failed")])
def test_a_template_without_tools_fails_only_where_they_are_its_to_describe(tmp_path: Path, prompt: str, state: str) -> None:
    folder = write_template_folder(tmp_path / "model", (TEMPLATES / "deepseek-v3.1.jinja").read_text())
    configuration = load_configuration(flags={"run.model": str(folder), "environment.prompt": prompt}).configuration
    findings, conversation = diagnose_model(configuration)
    tools = next(finding for finding in findings if finding.name == "tools")
    assert (tools.state, conversation) == (state, "")
    assert "shows no tools" in tools.detail


PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_up_refuses_at_once_a_template_that_cannot_describe_tools(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_starter_folder(), folder)
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    configuration = load_configuration(flags={"environment.prompt": "template", "run.model": str(folder)}).configuration
    with pytest.raises(UserError, match=r"shows no tools to the model: set environment\.prompt = fleet or compact"):
        check_everything(configuration)
