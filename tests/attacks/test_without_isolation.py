"""Neither bubblewrap nor namespaces: code from elsewhere is not run, unless the operator says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleetbus_workers.environment.adapters.warehouse.tasks import build_warehouse_task
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, backends
from fleetbus_workers.environment.isolation.verifier import Policy, Verifier, VerifierLimits
from fleetbus_workers.environment.isolation.verifier.own import is_own_verifier
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_alone

MARK = "def verify(): return 1.0"
OWN = build_warehouse_task(1).verifier or ""

anyio_backend = asyncio_alone


@pytest.fixture
def nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_detected", {backends.KINDS: "none in this test", (): "none in this test"})


class Tools:
    async def call_tool(self, name: str, arguments: dict[str, object]) -> object:
        raise RuntimeError("no tools here")

    async def query(self, sql: str, params: Sequence[object]) -> object:
        return [[5]]


async def grade(sandbox: Policy, code: str) -> tuple[float | None, str]:
    verifier = Verifier(VerifierLimits(seconds=20), sandbox=sandbox)
    async with verifier.run():
        verdict = await verifier.verify(code, final_answer="5", conversation=[], tools=Tools())
    return verdict.reward, verdict.reason


async def test_a_verifier_from_elsewhere_is_not_run(nothing_isolates: None, tmp_path: Path) -> None:
    reward, reason = await grade("auto", f"open({str(tmp_path / 'ran')!r}, 'w')\n{MARK}")
    assert reward is None and "no sandbox works here" in reason and "environment.sandbox = limits" in reason
    assert not (tmp_path / "ran").exists()


async def test_the_operator_may_permit_it(nothing_isolates: None) -> None:
    assert await grade("limits", MARK) == (1.0, "")


async def test_the_operator_may_forbid_all(nothing_isolates: None) -> None:
    with pytest.raises(IsolationUnavailable):
        await grade("required", OWN)


async def test_verifiers_of_fleetbus_itself_are_run(nothing_isolates: None) -> None:
    assert await grade("auto", OWN) == (1.0, "")


@pytest.mark.parametrize(
    "code",
    [
        OWN + "import os\n",
        OWN.replace('["', '[open("/etc/passwd").read(), "'),
        OWN.replace("SELECT ", "SELECT name FROM sqlite_master; "),
        OWN.replace("return 1.0", "return 2.0"),
        OWN.replace('"""1 if', '"""1 if\n'),
        "\n" + OWN,
    ],
)
def test_what_only_looks_like_one_of_them_is_from_elsewhere(code: str) -> None:
    assert code != OWN and not is_own_verifier(code)


async def test_code_of_models_is_not_run(nothing_isolates: None) -> None:
    with pytest.raises(IsolationUnavailable):
        build_environment_factory("coding", verifier=Verifier())


@pytest.mark.skipif(os.environ.get("FLEETBUS_ATTACKS_ISOLATION") != "none", reason="`just attacks` takes all isolation away")
async def test_the_same_holds_where_the_kernel_refuses_it() -> None:
    reward, reason = await grade("auto", MARK)
    assert reward is None and "no sandbox works here" in reason
    assert await grade("auto", OWN) == (1.0, "")
