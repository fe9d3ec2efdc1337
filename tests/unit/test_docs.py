"""The site's pages: all are reached, their links lead somewhere, generated references are complete; README is short."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def load_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


PAGES: dict[str, str] = load_hooks().build_pages()


def list_navigation(entry: Any) -> Iterator[str]:
    match entry:
        case str():
            yield entry
        case dict():
            for inner in entry.values():
                yield from list_navigation(inner)
        case list():
            for inner in entry:
                yield from list_navigation(inner)


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(list_navigation(yaml.safe_load(text)["nav"]))
    written = {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md") if "examples" not in file.parts} | set(PAGES)
    assert listed == {page for page in written if page == "decisions/index.md" or not page.startswith("decisions/")}


def sources() -> list[Path]:
    return [file for file in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")) if file.name != "CHANGELOG.md"]


@pytest.mark.parametrize("file", sources(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_or_a_generated_page(file: Path) -> None:
    for target in LINK.findall(re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)):
        place = (file.parent / target).resolve()
        generated = place.relative_to(DOCS).as_posix() if place.is_relative_to(DOCS) else ""
        assert place.exists() or generated in PAGES, f"{file.name} links to {target}"


def test_the_references_have_every_command_setting_message_and_subject() -> None:
    from fleetbus.config.fields import list_settings
    from fleetbus_schemas import MESSAGES
    from fleetbus_schemas.asyncapi import list_channels
    from fleetbus_workers.cli.program import COMMANDS

    assert all(f"## fleetbus {name}\n" in PAGES["reference/cli.md"] for name in COMMANDS)
    assert all(f"`{setting.name}`" in PAGES["reference/settings.md"] for setting in list_settings())
    assert all(f"## {kind.__name__}\n" in PAGES["reference/messages.md"] for kind in MESSAGES)
    assert all(f"`{channel.address}`" in PAGES["reference/subjects.md"] for channel in list_channels())
    assert PAGES["decisions/index.md"].count("\n- ") == len(list((DOCS / "decisions").glob("[0-9]*.md")))


def test_every_record_has_a_status_and_is_cited_where_it_rules() -> None:
    pages = [file for file in DOCS.rglob("*.md") if file.parent.name != "decisions"]
    cited = "\n".join(
        file.read_text() for file in (*pages, *(ROOT / "fleetbus").rglob("*.py"), *(ROOT / "workers").rglob("*.py"))
    )
    records = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    assert not [file.name for file in records if not re.search(r"^\*\*Status:\*\* [a-z ]+; ", file.read_text(), re.MULTILINE)]
    assert not [file.name for file in records if f"decisions/{file.name[:4]}" not in cited]


def test_commands_in_the_docs_exist_with_their_flags() -> None:
    import click

    from fleetbus_workers.cli.program import COMMANDS, program

    for file in (*(DOCS / "tutorial").glob("*.md"), *(DOCS / "how-to").glob("*.md"), *(DOCS / "concepts").glob("*.md")):
        for name, rest in re.findall(r"fleetbus ([a-z]+)\b([^`\n|#]*)", file.read_text()):
            if name not in COMMANDS:
                assert name in ("trains", "install", "brings"), f"{file.name}: fleetbus {name}"
                continue
            command = program.get_command(click.Context(program), name)
            assert command is not None
            inner = list(command.commands.values()) if isinstance(command, click.Group) else []
            options = [option for each in (command, *inner) for option in each.params]
            flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest)) <= flags, f"{file.name}: fleetbus {name}{rest}"


def test_readme_is_short_and_its_pictures_are_small() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1100
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert sum((ROOT / picture).stat().st_size for picture in pictures) < 300_000
