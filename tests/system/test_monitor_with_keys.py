"""The page with a monitor's key, on a server with keys: it searches and shows the log, and goes on where images are refused."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import anyio
import httpx
import pytest

from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.objects import images_bucket, put_content
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas import Action, AttemptStarted, EpisodeRequested, Task, encode
from fleetbus_schemas.tokens import pack_ids
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, secured_server

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.support.monitor_page import serve_run_page

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


async def publish_episode(secured: SecuredServer) -> str:
    """One episode with an answer, and an image in the bucket; its name."""
    task = Task(key="t", prompt="Find it.")
    request = EpisodeRequested(
        episode_id="e1", group_id="g1", sample_index=0, split="train", task=task, policy="default", deadline_ns=0
    )
    claim = AttemptStarted(episode_id="e1", attempt=1, worker="environment-1", nonce="n", lane="e0")
    action = Action(episode_id="e1", attempt=1, turn=0, text="no such file", sampled=pack_ids([7]))
    async with (
        secured.connect("learner") as learner,
        secured.connect("environment") as environment,
        secured.connect("inference") as inference,
    ):
        assert isinstance(environment, NatsBus)
        await learner.publish(SUBJECTS.task("default", "e1"), encode(request))
        await environment.publish(SUBJECTS.episode("e1"), encode(claim))
        await inference.publish(SUBJECTS.action("e0", "e1"), encode(action))
        return await put_content(environment.objects(images_bucket(TRUST)), b"\x89PNG\r\n\x1a\n" + bytes(40))


async def test_a_monitors_key_searches_what_was_said_and_diagnoses_and_is_refused_images_alone(
    secured: SecuredServer, tmp_path: Path
) -> None:
    image = await publish_episode(secured)
    (tmp_path / TRUST / "tokens").mkdir(parents=True)
    configuration = Configuration(run=RunSettings(name=TRUST, folder=str(tmp_path)))
    async with (
        secured.connect("monitor") as watching,
        serve_run_page(watching, configuration) as address,
        httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as page,
    ):
        for _ in range(2):
            assert (await page.get(f"/api/images/{image}")).status_code == 403
        found = {"rows": []}
        with anyio.fail_after(30):
            while not found["rows"]:  # until the page has read the log
                found = (await page.get("/api/episodes", params={"said": "SUCH file"})).json()
        assert found["rows"][0]["found"]["parts"] == ["no ", "such", " ", "file", ""] and found["indexed"] == 1.0
        assert (await page.get("/api/episodes", params={"said": "gone"})).json()["total"] == 0
        shown = (await page.get("/api/episodes/e1")).json()
        assert shown["turns"][0]["action"]["text"] == "no such file" and shown["turns"][0]["action"]["trainer"] is None
        refused = await page.get("/api/episodes", params={"said": "--"})
        assert refused.status_code == 400 and "nothing to search for" in refused.text
        diagnosed = (await page.get("/api/diagnosis")).json()
        assert diagnosed["problem"] == "" and diagnosed["diagnosis"]["unmeasured"] == ["everything: no step was trained yet"]
        headers = (await page.get("/")).headers
        assert headers["x-content-type-options"] == "nosniff" and "img-src 'self' data:;" in headers["content-security-policy"]
    assert (tmp_path / TRUST / "text.sqlite").is_file()
