"""Pages of the site that are made when it is built: references from the code, the list of decisions, `llms.txt`.

mkdocs calls the functions that are named `on_...`. Nothing here is kept in the repository, so nothing can be out of date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)[^)]+\)")
"""A link to a file that is not below docs/: it becomes text, because the site does not have the file."""

COPIES = {"changelog.md": "CHANGELOG.md", "architecture.md": "ARCHITECTURE.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for name, text in build_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave docs/ become text; those of copied pages into docs/ are shortened."""
    if page.file.src_uri in COPIES:
        markdown = markdown.replace("](docs/", "](")
        return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)#]+?)(#[^)]*)?\)", _keep_if_page, markdown)
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda link: link[0] if link[2].count("../") <= depth else link[1], markdown)


def on_post_build(config: Any) -> None:
    """`llms.txt`: one line per page, as llmstxt.org describes it."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for section, entries in (each for item in config["nav"] for each in item.items()):
        listed = [entries] if isinstance(entries, str) else entries
        pages = [page if isinstance(page, str) else next(iter(page.values())) for page in listed]
        lines += [f"## {section}", "", *(_format_llms_line(name) for name in pages), ""]
    (Path(config["site_dir"]) / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def build_pages() -> dict[str, str]:
    """Paths below docs/ and texts of all generated pages."""
    return {
        "reference/cli.md": build_command_reference(),
        "reference/settings.md": build_settings_reference(),
        "reference/messages.md": build_message_reference(),
        "reference/subjects.md": build_subject_reference(),
        "decisions/index.md": build_decision_list(),
        **{name: (ROOT / source).read_text(encoding="utf-8") for name, source in COPIES.items()},
    }


def build_command_reference() -> str:
    """Every command with its help, as it is printed."""
    from fleetbus_workers.cli.program import COMMANDS, program

    parts = ["# Command line\n", "Exit status everywhere: 0 done, 1 failed, 2 bad input, 130 interrupted.\n"]
    parent = click.Context(program, info_name="fleetbus")
    for name in sorted(COMMANDS):
        found = program.get_command(parent, name)
        assert found is not None
        parts += [f"## fleetbus {name}\n", *_describe_command(found, parent, name)]
    return "\n".join(parts)


def _describe_command(command: click.Command, parent: click.Context, name: str) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=110, terminal_width=110)
    yield f"```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield f"### {context.command_path} {inner}\n"
            yield from _describe_command(found, context, inner)


def build_settings_reference() -> str:
    """Every setting by table: type, default, limits, what it does."""
    from fleetbus.config.fields import tables

    parts = ["# Settings\n", "How they are set: [Configuration](../configuration.md).\n"]
    for table, settings in tables().items():
        parts += [f"## {table}\n", "| setting | type | default | what it is |", "|---|---|---|---|"]
        for setting in settings.values():
            kind = " or ".join(f"`{choice}`" for choice in setting.choices) or setting.base.__name__
            default = "" if setting.default == "" else f"`{setting.default}`"
            parts.append(f"| `{setting.name}` | {kind} | {default} | {_cell(setting.description)} |")
        parts.append("")
    return "\n".join(parts)


def build_message_reference() -> str:
    """Every message with its fields and what its docstring says."""
    import fleetbus_schemas

    parts = [
        "# Messages\n",
        "msgpack maps with a `type`; fields are only ever added, with defaults. `fleetbus schema` prints JSON Schema.\n",
    ]
    for kind in sorted(fleetbus_schemas.MESSAGES, key=lambda kind: kind.__name__):
        parts += [f"## {kind.__name__}\n", _escape(inspect.cleandoc(kind.__doc__ or "")) + "\n"]
        parts += ["| field | type | default |", "|---|---|---|"]
        for field in msgspec.structs.fields(kind):
            default = "required" if field.required else f"`{_read_default(field)}`"
            parts.append(f"| `{field.name}` | `{_cell(_format_type(kind, field.name))}` | {_cell(default)} |")
        parts.append("")
    return "\n".join(parts)


def _format_type(kind: type, name: str) -> str:
    return next(str(found[name]) for base in kind.__mro__ if name in (found := inspect.get_annotations(base)))


def _read_default(field: Any) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def build_subject_reference() -> str:
    """Every subject: who sends what on it, and whether the log keeps it."""
    from fleetbus_schemas.asyncapi import list_channels

    parts = ["# Subjects\n", "`fleetbus schema --asyncapi` prints the same as AsyncAPI 3.0.\n"]
    parts += ["| subject | messages | from | to | in the log |", "|---|---|---|---|---|"]
    for channel in list_channels():
        names = ", ".join(f"[{kind.__name__}](messages.md#{kind.__name__.lower()})" for kind in channel.messages)
        row = (f"`{channel.address}`", names, ", ".join(channel.senders), ", ".join(channel.receivers))
        parts.append(f"| {' | '.join(map(_cell, row))} | {'yes' if channel.kept == 'log' else 'no'} |")
    return "\n".join(parts) + "\n"


def build_decision_list() -> str:
    """The records by number, with their titles."""
    lines = ["# Decisions\n", "Why it is as it is: each record says where it rules, and what was measured.\n"]
    files = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    lines += [f"- [{_read_title(file.read_text(encoding='utf-8'))}]({file.name})" for file in files]
    return "\n".join(lines) + "\n"


def _format_llms_line(name: str) -> str:
    text = build_pages()[name] if not (DOCS / name).is_file() else (DOCS / name).read_text(encoding="utf-8")
    sentence = next((line for line in text.splitlines()[1:] if line and line[0].isalpha()), "")
    return f"- [{_read_title(text)}]({name.removesuffix('.md')}.html): {sentence}".rstrip(": ")


def _read_title(text: str) -> str:
    return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")), "fleetbus")


def _keep_if_page(link: re.Match[str]) -> str:
    return link[0] if (DOCS / link[2]).is_file() or link[2] in COPIES else link[1]


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("``", "`")
