"""``fleetbus doctor``: is this machine ready, and if not, what to do."""

from typing import Any

import click

from fleetbus_workers.cli.look.diagnosis import Finding, diagnose
from fleetbus_workers.cli.look.model_diagnosis import diagnose_model
from fleetbus_workers.cli.look.run_options import nats_http_option
from fleetbus_workers.cli.options import SettingsCommand, load_settings, settings_options
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.exit_status import CRASHED, FINISHED
from fleetbus_workers.run_access.sources import resolve_nats_http

_MARKS = {"ok": "ok  ", "warning": "warn", "failed": "FAIL"}


@click.command("doctor", cls=SettingsCommand)
@json_option("the findings")
@nats_http_option
@settings_options("run", "nats")
def command(as_json: bool, nats_http: str, **values: Any) -> int:
    """Check whether `fleetbus up` can work here: packages, nats-server, clocks, cores, memory, disk.

    Exits with 0 if it can (warnings do not count) and with 1 if it cannot. With --nats it checks that server instead of
    starting one. With --model it also says what the chat template of that folder does with tools and reasoning, and shows
    the conversation of three turns that proves it.
    """
    configuration = load_settings(values).configuration
    findings = diagnose(configuration, resolve_nats_http(configuration, nats_http))
    conversation = ""
    if configuration.run.model:
        found, conversation = diagnose_model(configuration)
        findings += found
    ready = all(finding.state != "failed" for finding in findings)
    _show(findings, ready, as_json, conversation)
    return FINISHED if ready else CRASHED


def _show(findings: list[Finding], ready: bool, as_json: bool, conversation: str) -> None:
    if as_json:
        facts = {"ready": ready, "findings": findings} | ({"conversation": conversation} if conversation else {})
        print_json(facts)
        return
    for finding in findings:
        print(f"{_MARKS[finding.state]}  {finding.name}: {finding.detail}")
    if conversation:
        print(f"\n{conversation}")
