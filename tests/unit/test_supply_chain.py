"""Everything that images and continuous integration install is pinned, with hashes: an index that lies is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy/locks"
LOCKED_EXTRAS = {
    "ci": ["test"],
    "server": ["server"],
    "tools": ["auth"],
    "environment": ["environment"],
    "monitor": ["monitor"],
    "learner": ["environment", "torch"],
    "docs": ["docs"],
}
WITHOUT_HASHES = {"torch", "vllm==0.33.0"}
"""What is installed by version alone: neither index has its files under the hashes of the other."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_lock(name: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes by name of package."""
    text = (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    packages = {}
    for line in lines:
        found = re.match(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)[^#]*?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*$", line)
        assert found, f"{name}.txt: not a version with its hashes: {line[:100]}"
        packages[canonicalize_name(found[1])] = (found[2], found[3].count("--hash"))
    return packages  # type: ignore[return-value]


def list_requirements(extras: list[str]) -> list[Requirement]:
    """The requirements of the project with some extras, those of extras of its own included."""
    found, waiting = [], [*PROJECT["dependencies"]]
    for extra in extras:
        waiting += PROJECT["optional-dependencies"][extra]
    while waiting:
        requirement = Requirement(waiting.pop())
        if canonicalize_name(requirement.name) == PROJECT["name"]:
            waiting += [each for extra in requirement.extras for each in PROJECT["optional-dependencies"][extra]]
        elif requirement.marker is None or requirement.marker.evaluate({"sys_platform": "linux"}):
            found.append(requirement)
    return found


def list_installs(text: str) -> list[str]:
    """The arguments of every installation by pip in a Dockerfile, a workflow or a script."""
    return re.findall(r"\bpip (?:install|download|wheel) ([^\n&|]+)", text.replace("\\\n", " "))


def is_pinned(arguments: str) -> bool:
    words = re.sub(r"\$\{TORCH_INDEX[^ ]* [^ ]*\}\}?", "", arguments).split()
    if "--require-hashes" in words and "--no-deps" in words:
        return True
    if "--no-deps" in words:  # what was built from this source
        return words[-1] in ("/wheel/*", "/src") and ("--no-build-isolation" in words or words[-1] == "/wheel/*")
    words = [word for word in words if word not in ('"$(echo', '/wheel/*.whl)[vllm]"', "-c", "/locks/constraints.txt")]
    named = [word for word in words if not word.startswith("-")]
    return bool(named) and set(named) <= WITHOUT_HASHES


@pytest.mark.parametrize("name", [*LOCKED_EXTRAS, "build"])
def test_every_package_of_a_lock_has_one_version_and_hashes(name: str) -> None:
    assert len(read_lock(name)) >= 5
    assert all(hashes for _, hashes in read_lock(name).values())


@pytest.mark.parametrize(("name", "extras"), LOCKED_EXTRAS.items())
def test_a_lock_holds_what_the_project_requires(name: str, extras: list[str]) -> None:
    lock = read_lock(name)
    for requirement in list_requirements(extras):
        if requirement.name != "torch":
            assert canonicalize_name(requirement.name) in lock, f"`just lock`: {requirement}"
            version = lock[canonicalize_name(requirement.name)][0]
            assert requirement.specifier.contains(version, prereleases=True), f"`just lock`: {requirement}, not {version}"


@pytest.mark.parametrize("name", [*LOCKED_EXTRAS, "build"])
def test_images_hold_the_versions_that_the_tests_ran_with(name: str) -> None:
    tested, held = read_lock("ci"), read_lock(name)
    assert {package: each[0] for package, each in held.items() if package in tested} == {
        package: each[0] for package, each in tested.items() if package in held
    }
    assert name == "docs" or set(held) <= set(tested), "the site alone needs what no test does"


@pytest.mark.parametrize("path", ["Dockerfile", ".github/workflows/ci.yml", ".github/workflows/nightly.yml"])
def test_images_and_continuous_integration_install_nothing_unpinned(path: str) -> None:
    installs = list_installs((ROOT / path).read_text())
    assert installs
    assert [each for each in installs if not is_pinned(each)] == []


def test_torch_has_one_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line.partition("==")[0] for line in lines] == ["torch"]
    assert "-c /locks/constraints.txt" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize(
    "planted",
    [
        "httpx",
        "-r requirements.txt",
        "-c constraints.txt '/src[environment]'",
        "--require-hashes -r /locks/server.txt",
        "--no-deps httpx",
        "vllm",
        "torch httpx",
        "--no-deps --wheel-dir /wheel /src",
    ],
)
def test_an_unpinned_installation_is_found(planted: str) -> None:
    (arguments,) = list_installs(f"RUN pip install {planted}\n")
    assert not is_pinned(arguments)


def test_actions_are_named_by_commit() -> None:
    used = [
        line.split("uses:")[1].split()[0]
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used and [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each)] == []


def test_images_from_elsewhere_are_one_that_builds_may_name_by_digest() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE))
    assert bases - stages == {"${BASE}"}
    copied = set(re.findall(r"--from=(\S+)", dockerfile))
    assert copied <= stages
    deployed = [ROOT / "compose.yaml", *(ROOT / "deploy/kubernetes").glob("*.yaml")]
    images = {image for path in deployed for image in re.findall(r"^\s*image: (\S+)", path.read_text(), re.MULTILINE)}
    assert images and all(image.startswith("fleetbus/") for image in images)
