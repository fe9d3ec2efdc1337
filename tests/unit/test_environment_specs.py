"""Environment specs: each form gives environments, each mistake one line that says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleetbus.errors import UserError
from fleetbus.user_code import load_callable
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.python_class.environment import CALLS
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.environment.specs import build_environment_factory, is_own_class
from tests.support.tool_calls import NoGrader

MODULE = """
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.adapters.warehouse.server import make_server

class Mine(ScriptedEnvironment):
    pass

class Sized(ScriptedEnvironment):
    def __init__(self, size): ...

class Half:
    replayable = False
    async def open(self, task): ...

def serve(task):
    return make_server(task.seed or 0)

serve.replayable = True
number = 3
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spec_module.py").write_text(MODULE)
    (tmp_path / "spec_broken.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "spec_module", raising=False)


@pytest.mark.parametrize(
    ("spec", "replayable"),
    [
        ("warehouse", True),
        ("scripted", True),
        ("mcp:spec_module:serve", True),
        ("mcp:fleetbus_workers.environment.adapters.warehouse.server:serve_task", False),
        (f"stdio:{sys.executable} -m mcp_server_time", False),
        ("spec_module:Mine", True),
    ],
)
async def test_every_form_makes_a_new_environment_each_time(spec: str, replayable: bool) -> None:
    factory = build_environment_factory(spec, verifier=NoGrader())
    async with factory.run():
        first, second = factory(), factory()
        assert first is not second
        assert first.replayable is replayable


async def test_a_user_s_server_factory_is_played() -> None:
    factory = build_environment_factory("mcp:spec_module:serve", verifier=NoGrader())
    environment = factory()
    await environment.open(Task(key="t", prompt="p", seed=3))
    assert "find_item" in str((await environment.reset()).messages[0].content)
    await environment.close()


async def test_a_scripted_environment_has_the_turns_that_it_was_told() -> None:
    for spec, config, turns in (("scripted", {}, 3), ("scripted:5", {}, 5), ("scripted:5", {"turns": 2}, 2)):
        environment = build_environment_factory(spec, verifier=NoGrader())()
        assert isinstance(environment, ScriptedEnvironment)
        await environment.open(Task(key="t", prompt="p", config=config))
        assert (await environment.reset()).messages[0].content == "p"
        steps = [await environment.step(Action(episode_id="e", attempt=1, turn=turn, text="")) for turn in range(turns)]
        assert [step.terminated for step in steps] == [False] * (turns - 1) + [True]
        assert await environment.verify() == Verdict(reward=1.0)
        await environment.close()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "is none of: warehouse, scripted[:TURNS], mcp:MODULE:FACTORY"),
        ("warehuose", "is none of"),
        ("warehouse:3", "must be written as warehouse"),
        ("mcp:", "must be written as mcp:MODULE:FACTORY"),
        ("openenv:", "must be written as openenv:URL"),
        ("nemo-gym:", "must be written as nemo-gym:URL"),
        ("ors:", "must be written as ors:URL[#ENVIRONMENT]"),
        ("ors:h:8080#sums", "is not an address such as ors:http://127.0.0.1:8080#my_env"),
        ("ors:http://h:port#sums", "is not an address such as"),
        ("ors:http://u:secret@h#sums", "must not hold a password: set ORS_API_KEY instead"),
        ("ors:http://h?size=3#sums", "must not have a query"),
        ("ors:http://h#sums count=3", "must be written as ors:URL[#ENVIRONMENT] [split=NAME]"),
        ("https:", "must be written as http:URL"),
        ("remote-gym:", "must be written as remote-gym[:URL"),
        ("remote-gym: ", "must be written as remote-gym[:URL"),
        ("remote-gym:,", "',' is not the address of a remote-gym server"),
        ("gym:", "must be written as gym[:ID]"),
        ("scripted:x", "scripted:3"),
        ("scripted:0", "1 or more"),
        ("stdio:", "names no command"),
        ("stdio:no-such-command --x", "command 'no-such-command' not found"),
        ("stdio:python 'x", "cannot be read"),
        ("mcp:spec_module", "must name a module and a name in it"),
        ("mcp:spec_module:absent", "has no 'absent'"),
        ("mcp:spec_module:number", "cannot be called"),
        ("mcp:no_such_module:serve", "cannot import no_such_module: ModuleNotFoundError"),
        ("spec_broken:Class", "cannot import spec_broken: ModuleNotFoundError"),
        ("spec_module:Half", "lacks reset, step, state, verify, close"),
        (
            "spec_module:Sized",
            "is called without arguments: missing a required argument: 'size' (spec_module.py:9 in Sized.__init__): "
            "read values from task.config in open, or name a subclass that passes them",
        ),
        ("../x.py:Class", "cannot import ../x.py: FileNotFoundError"),
        ("x/y:Class", "must name a module"),
    ],
)
def test_a_mistake_gets_one_line(spec: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_environment_factory(spec, verifier=NoGrader())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["ors", "remote-gym", "openenv", "nemo-gym"])
@pytest.mark.parametrize("address", ["http://u:secret@h", "ftp://u:secret@h", "http://u:secret@h:port"])
def test_a_password_in_the_address_of_a_server_is_refused_and_not_shown(kind: str, address: str) -> None:
    with pytest.raises(UserError) as caught:
        build_environment_factory(f"{kind}:{address}", verifier=NoGrader())
    assert "secret" not in str(caught.value)


@pytest.mark.integration
def test_a_scripted_environment_needs_no_mcp_and_nothing_here_needs_torch() -> None:
    code = (
        "import sys; from fleetbus_workers.environment.specs import build_environment_factory as f; "
        "f('scripted', verifier=None); "
        "assert 'mcp' not in sys.modules; f('warehouse', verifier=None); assert 'mcp' in sys.modules; "
        "assert not {'torch', 'numpy', 'nats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=30)


OWN = "class Own:\n    replayable = True\n" + "".join(f"    async def {call}(self, *given): ...\n" for call in CALLS)


def test_a_file_elsewhere_imports_what_is_beside_it_even_by_a_name_that_is_also_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, code in (("here", "number = 1"), ("there", OWN)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "spec_beside.py").write_text(code)
    (tmp_path / "there" / "own.py").write_text("from spec_beside import Own")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delitem(sys.modules, "spec_beside", raising=False)
    for _ in range(2):
        assert is_own_class("../there/own.py:Own") and build_environment_factory("../there/own.py:Own", verifier=NoGrader())
    assert sys.path.count(str(tmp_path / "there")) == 1 and sys.path[0] == str(tmp_path / "there")


@pytest.mark.integration
async def test_a_pool_s_processes_import_what_is_beside_a_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "pool_beside.py").write_text(OWN)
    (tmp_path / "own.py").write_text("from pool_beside import Own")
    monkeypatch.chdir(tmp_path / "here")
    factory = build_environment_factory("pool:../own.py:Own", verifier=NoGrader())
    async with factory.run():
        environment = factory()
        await environment.open(Task(key="t", prompt="p"))
        await environment.close()


def test_a_file_of_a_package_is_told_the_name_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/sub/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "pkg" / "sub" / "env.py").write_text("from . import helper")
    with pytest.raises(UserError, match=r"no known parent package; use pkg\.sub\.env:NAME$"):
        build_environment_factory("pkg/sub/env.py:Own", verifier=NoGrader())
    monkeypatch.chdir(tmp_path / "pkg")
    with pytest.raises(UserError, match=f"; use pkg.sub.env:NAME in the folder {tmp_path}$"):
        build_environment_factory("sub/env.py:Own", verifier=NoGrader())


def test_a_class_is_found_in_a_file_by_its_path_and_imported_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    spec = f"{tmp_path / 'own.py'}:Own"
    assert build_environment_factory(spec, verifier=NoGrader())().replayable and is_own_class(spec)
    assert load_callable("environment", spec) is load_callable("environment", spec)
