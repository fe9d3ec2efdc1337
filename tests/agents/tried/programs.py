"""Agents that are programs: the settings that point each to the gateway, and its command for one prompt."""

from __future__ import annotations

from tests.agents.tried.place import SERVER_NAME, Place


def claude_code(place: Place) -> list[str]:
    place.variables["IS_SANDBOX"] = "1"  # it takes no root otherwise
    served = place.write("mcp.json", {"mcpServers": place.served})
    flags = ["--model", "policy", "--permission-mode", "bypassPermissions", "--mcp-config", str(served)]
    return [place.find("node_modules/@anthropic-ai/claude-code-*/claude"), "-p", place.prompt, *flags]


def codex(place: Place) -> list[str]:
    url = place.session["openai_base_url"]
    command, *arguments = place.look_server
    settings = (
        "model_provider=policy",
        "mcp_optional_startup_grace_ms=60000",  # it waits half a second otherwise
        f'model_providers.policy={{name="policy", base_url="{url}", env_key="OPENAI_API_KEY", wire_api="responses"}}',
        f'mcp_servers.{SERVER_NAME}={{command="{command}", args={arguments!r}}}'.replace("'", '"'),
    )
    program = place.find("node_modules/@openai/codex-*/vendor/*/bin/codex")
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy"]
    return [program, "exec", *flags, *(word for setting in settings for word in ("-c", setting)), place.prompt]


def gemini_cli(place: Place) -> list[str]:
    served = {name: server | {"trust": True} for name, server in place.served.items()}
    chosen = {"security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}}}
    place.write(".gemini/settings.json", chosen | {"mcpServers": served})
    return [place.find("node_modules/.bin/gemini"), "-p", place.prompt, "-m", "policy", "--yolo"]


def qwen_code(place: Place) -> list[str]:
    place.variables["OPENAI_MODEL"] = "policy"
    served = {name: server | {"trust": True} for name, server in place.served.items()}
    place.write(".qwen/settings.json", {"security": {"auth": {"selectedType": "openai"}}, "mcpServers": served})
    return [place.find("node_modules/.bin/qwen"), "-p", place.prompt, "--yolo"]


def opencode(place: Place) -> list[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": place.session["openai_base_url"], "apiKey": place.session["key"]},
        "models": {"policy": {"name": "policy"}},
    }
    served = {SERVER_NAME: {"type": "local", "command": place.look_server, "enabled": True}}
    settings = {"provider": {"fleet": provider}, "mcp": served, "permission": "allow", "share": "disabled", "autoupdate": False}
    place.variables["OPENCODE_CONFIG"] = str(place.write("opencode.json", settings))
    return [place.find("node_modules/opencode-linux-x64/bin/opencode"), "run", "-m", "fleet/policy", place.prompt]


def pi(place: Place) -> list[str]:
    provider = {
        "baseUrl": place.session["openai_base_url"],
        "api": "openai-completions",
        "apiKey": "OPENAI_API_KEY",
        "models": [{"id": "policy"}],
    }
    place.write(".pi/agent/models.json", {"providers": {"fleet": provider}})
    return [place.find("node_modules/.bin/pi"), "-p", place.prompt, "--provider", "fleet", "--model", "policy"]


def continue_cli(place: Place) -> list[str]:
    command, *arguments = place.look_server
    model = {
        "name": "policy",
        "provider": "openai",
        "model": "policy",
        "apiBase": place.session["openai_base_url"],
        "apiKey": place.session["key"],
        "roles": ["chat"],
        "capabilities": ["tool_use"],
    }
    server = {"name": SERVER_NAME, "command": command, "args": arguments}
    settings = {"name": "tried", "version": "1.0.0", "schema": "v1", "models": [model], "mcpServers": [server]}
    file = place.write("config.yaml", settings)  # JSON is YAML
    return [place.find("node_modules/.bin/cn"), "-p", place.prompt, "--config", str(file), "--auto"]


def aider(place: Place) -> list[str]:
    flags = ["--model", "openai/policy", "--yes-always", "--no-git", "--no-show-model-warnings", "--no-check-update"]
    flags += ["--auto-test", "--test-cmd", "echo look-test; grep right made.txt"]
    return [place.find("bin/aider"), *flags, "--analytics-disable", "--message", place.prompt, "made.txt"]


def cline(place: Place) -> list[str]:
    url, key = place.session["openai_base_url"], place.session["key"]
    own = {"provider": "openai-compatible", "apiKey": key, "model": "policy", "baseUrl": url}
    provider = {"settings": own, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    settings = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {"openai-compatible": provider},
    }
    place.write(".cline/data/settings/providers.json", settings)
    place.write(".cline/data/settings/cline_mcp_settings.json", {"mcpServers": place.served})
    return [place.find("node_modules/.bin/cline"), place.prompt]
