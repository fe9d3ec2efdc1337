"""Checks a model folder for `fleetbus doctor`: how its chat template appends turns, writes tools and treats reasoning."""

from pathlib import Path

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.cli.look.diagnosis import Finding
from fleetbus_workers.inference.chat_template import ChatTemplate


def diagnose_model(configuration: Configuration) -> tuple[list[Finding], str]:
    """The findings for the folder that ``run.model`` names, and the conversation with tools that was proved; empty if none
    was."""
    try:
        template = ChatTemplate(Path(configuration.run.model))
    except UserError as error:
        return [Finding(name="chat template", state="failed", detail=str(error))], ""
    ends = ", ".join(sorted(template.decode([end]) for end in template.stop_ids))
    findings = [
        Finding(name="chat template", state="ok", detail=f"three turns proved without tools; a turn ends with {ends}"),
        _describe_reasoning(template),
    ]
    try:
        support = template.tools
    except UserError as error:
        needed = configuration.environment.prompt == "template"
        return [*findings, Finding(name="tools", state="failed" if needed else "warning", detail=str(error))], ""
    calls = "several calls per response" if support.parallel else "one call per response"
    detail = f"format {support.format.name} ({support.format.models}), {calls}, results by role tool: three turns proved"
    return [*findings, Finding(name="tools", state="ok", detail=detail)], support.proof


def _describe_reasoning(template: ChatTemplate) -> Finding:
    if template.reasoning_marks is None:
        return Finding(name="reasoning", state="ok", detail="the template knows of none")
    opening, closing = template.reasoning_marks
    kept = "leaves it out of earlier turns" if template.drops_reasoning else "keeps it in earlier turns"
    return Finding(name="reasoning", state="ok", detail=f"between {opening} and {closing}; the template {kept}")
