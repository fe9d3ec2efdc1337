"""Credentials in what an episode or a library says, and in the worker's environment: no log, recording or child has them."""

from __future__ import annotations

import base64
import io
import re
import sys

import anyio
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.bus.base import StreamEntry
from fleetbus.config.settings import LogSettings
from fleetbus.logs.secret_formats import FORMATS, redact_formats
from fleetbus.logs.setup import configure_logs
from fleetbus.recording.redaction import Redactor
from fleetbus_schemas import ChatMessage, Observation, encode
from fleetbus_workers.environment.adapters.providers.process import select_variables

X, HEX = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1bC3dE5f", "0123456789abcdef0123456789abcdef01234567"
SECRETS = {
    "nats-nkey-seed": "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY",
    "openai, anthropic, openrouter": f"sk-ant-api03-{X}",
    "github-pat, -oauth, -app, -refresh": f"gho_{X}",
    "github-fine-grained-pat": f"github_pat_{X}_{X}",
    "gitlab": f"glpat-{X}",
    "gcp-api-key": f"AIza{X[:35]}",
    "google-oauth": f"ya29.{X}",
    "google-oauth-client": f"GOCSPX-{X}",
    "npm-access-token": f"npm_{X}",
    "pypi-upload-token": f"pypi-{X}",
    "huggingface": f"hf_{X}",
    "aws-access-token": "ASIAQWERTYUIOPASDFGH",
    "slack": f"xoxb-{X}",
    "slack-app-token": f"xapp-1-{X}",
    "slack-webhook": f"hooks.slack.com/services/{X}",
    "stripe": f"sk_live_{X}",
    "sendgrid": f"SG.{X}.{X}",
    "twilio": f"SK{HEX[:32]}",
    "digitalocean": f"dop_v1_{HEX}",
    "databricks": f"dapi{HEX[:32]}",
    "docker": f"dckr_pat_{X}",
    "hashicorp-vault": f"hvs.{X}",
    "hashicorp-terraform": f"{X[:14]}.atlasv1.{X}{X}",
    "pulumi": f"pul-{HEX}",
    "planetscale": f"pscale_tkn_{X}",
    "linear": f"lin_api_{X}",
    "notion": f"ntn_{X}",
    "grafana": f"glsa_{X}",
    "new-relic": f"NRAK-{X}",
    "sentry": f"sntrys_{X}",
    "shopify": f"shpat_{HEX}",
    "groq, xai, perplexity, nvidia, replicate, fireworks": f"gsk_{X}",
    "age-secret-key": f"AGE-SECRET-KEY-1{'Q' * 58}",
    "1password": f"ops_eyJ{X}",
    "telegram-bot-api-token": f"123456789:AA{X}",
    "jwt": f"eyJ{X}.eyJ{X}.{X}",
    "private-key": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{X}\n-----END OPENSSH PRIVATE KEY-----",
}
BASIC = base64.b64encode(b"ada:open sesame").decode()
TEXTS = {
    **{name: f"it said {secret} and ended" for name, secret in SECRETS.items()},
    "basic": f"Authorization: Basic {BASIC}",
    "basic in JSON": f'{{"authorization": "Basic {BASIC}"}}',
    "basic alone": f"> basic {BASIC}",
    "token scheme": f"authorization: token {X}",
    "bearer": f"Bearer {X}",
    "bare": f"Proxy-Authorization: {X}",
}


def carried(name: str) -> str:
    return SECRETS.get(name) or (BASIC if "basic" in name else X)


def test_every_format_has_its_example() -> None:
    assert set(SECRETS) == set(FORMATS)


def record_text(text: str) -> bytes:
    observation = Observation(
        episode_id="e",
        attempt=1,
        turn=0,
        policy="p",
        messages=(ChatMessage(role="tool", content=text),),
        tokens_left=5,
        environment_lane="e0",
        deadline_ns=1,
    )
    entry = StreamEntry(subject="fb.r.x", payload=encode(observation), sequence=1, time_ns=1)
    return Redactor().clean(entry).payload


@pytest.mark.parametrize("name", TEXTS)
def test_no_recording_has_it(name: str) -> None:
    assert carried(name).encode() not in record_text(TEXTS[name])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_no_recording_has_whatever_a_format_describes(name: str, data: st.DataObject) -> None:
    secret = data.draw(st.from_regex(re.compile(FORMATS[name], re.ASCII), fullmatch=True))
    assert secret.encode() not in record_text(f"it said {secret} and ended")


@pytest.mark.parametrize("format", ["console", "json"])
@pytest.mark.parametrize("name", TEXTS)
def test_no_log_has_it(name: str, format: str) -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(format=format), stream=stream)  # type: ignore[arg-type]
    structlog.get_logger().warning("call failed", reason=TEXTS[name])
    assert carried(name).splitlines()[-1 if "PRIVATE" not in carried(name) else 1] not in stream.getvalue()


@pytest.mark.parametrize(
    "text", ["basic arithmetic and bearer instruments", "SKU 12", "the basic idea", "task-12 sk-1", "a: Basic"]
)
def test_prose_stays(text: str) -> None:
    assert redact_formats(text) == text


ENVIRONMENT = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "OPENAI_API_KEY": "1",
    "AWS_SECRET_ACCESS_KEY": "1",
    "HF_TOKEN": "1",
    "WANDB_API_KEY": "1",
    "GITHUB_TOKEN": "1",
    "DATABASE_URL": "1",
    "FLEET_API_KEY": "1",
    "GYM_API_KEY": "1",
    "FLEETBUS_NATS_URL": "1",
    "SSH_AUTH_SOCK": "1",
    "HTTPS_PROXY": "http://ada:secret@proxy",
}


def test_a_command_gets_no_variable_that_is_not_listed() -> None:
    assert select_variables(ENVIRONMENT, ()) == {"PATH": "/bin", "LC_ALL": "C"}
    assert set(select_variables(ENVIRONMENT, ("HF_TOKEN",))) == {"PATH", "LC_ALL", "HF_TOKEN"}


async def test_a_started_server_has_no_secret_in_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from fleetbus_workers.environment.adapters.providers.process import ProcessProvider
    from fleetbus_workers.environment.ownership import Labels

    for name, value in ENVIRONMENT.items():
        if name != "PATH":
            monkeypatch.setenv(name, value)
    seen = anyio.Path(str(tmp_path)) / "seen"
    code = f"import os,sys; open({str(seen)!r}, 'w').write(' '.join(os.environ)); print({{port}})"
    provider = ProcessProvider(f'{sys.executable} -c "{code}"')
    labels = Labels(run="r", owner="o", episode="e", expires=1 << 40)
    server = await provider.start(labels)
    try:
        with anyio.fail_after(30):
            while not await seen.exists() or not await seen.read_text():  # noqa: ASYNC110
                await anyio.sleep(0.05)
    finally:
        await provider.stop(server)
    assert not {name for name in ENVIRONMENT if name not in ("PATH", "LC_ALL")} & set((await seen.read_text()).split())
