"""The files for containers and clusters fit each other, settings, users and the run's plan, and Kubernetes's schemas."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetbus.auth.leaf_config import LEAF_PORT
from fleetbus.auth.server_config import account_of
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus.config.load import load_configuration
from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas.channels import ROLES
from fleetbus_workers.cli.program import COMMANDS

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
WITHOUT_SCHEMA = {"Kustomization", "ScaledObject", "ServiceMonitor"}
"""Not Kubernetes's own."""


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [(file.name, each) for file in MANIFESTS for each in yaml.safe_load_all(file.read_text())]


def pods() -> Iterator[dict[str, Any]]:
    for _, each in documents():
        if "template" in each.get("spec", {}):
            yield each["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return content


@pytest.fixture(scope="module")
def targets() -> set[str]:
    return set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "document"), documents(), ids=lambda value: value if isinstance(value, str) else value["kind"]
)
def test_kubernetes_schema_takes_each_manifest_and_refuses_an_unknown_field(name: str, document: dict[str, Any]) -> None:
    if document["kind"] in WITHOUT_SCHEMA:
        return
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, validate.latest_version(), strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(document | {"speck": {}}, validate.latest_version(), strict=True)


def test_every_manifest_is_in_the_kustomization() -> None:
    listed = (ROOT / "deploy" / "kubernetes" / "kustomization.yaml").read_text()
    assert [file.name for file in MANIFESTS if file.name not in listed] == ["kustomization.yaml"]


def test_images_are_targets_of_the_dockerfile(compose: dict[str, Any], targets: set[str]) -> None:
    composed = {service["build"]["target"] for service in compose["services"].values()}
    images = {container["image"].removeprefix("fleetbus/") for pod in pods() for container in pod["containers"]}
    assert composed | images <= targets
    assert all(service["image"] == f"fleetbus/{service['build']['target']}" for service in compose["services"].values())


def test_all_that_the_wheel_is_built_of_is_copied_into_the_image_that_builds_it() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = content["tool"]["hatch"]["build"]["targets"]["wheel"]
    parts = {path.split("/")[0] for path in (*wheel["packages"], *wheel["force-include"])}
    needed = {"pyproject.toml", content["project"]["readme"], *content["project"]["license-files"], *parts}
    (stage,) = re.findall(r"^FROM base AS source$(.*?)^FROM", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE | re.DOTALL)
    copied = {name for names in re.findall(r"^COPY (.*) /src/", stage, flags=re.MULTILINE) for name in names.split()}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert needed - copied == set()
    assert needed - let_in == set()


def test_the_variables_are_settings(compose: dict[str, Any]) -> None:
    """Loading refuses variables that it does not know."""
    settings = next(each["data"] for _, each in documents() if each["kind"] == "ConfigMap")
    configuration = load_configuration(variables=settings).configuration
    assert (configuration.nats.replicas, configuration.run.folder) == (3, "/runs")
    for service in compose["services"].values():
        variables = {
            name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value)) for name, value in service.get("environment", {}).items()
        }
        load_configuration(variables=variables)


def test_each_pod_holds_the_key_of_one_user_and_no_rights() -> None:
    users = []
    for pod in pods():
        secrets = [volume["secret"]["secretName"].removeprefix("fleetbus-") for volume in pod["volumes"] if "secret" in volume]
        users += secrets
        assert len(secrets) == 1
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"]
        assert all(container["securityContext"]["capabilities"] == {"drop": ["ALL"]} for container in pod["containers"])
    assert set(users) - {"server"} <= set(ROLES)


def test_engines_write_their_weights_where_they_may(compose: dict[str, Any]) -> None:
    """An inference worker that may not write to the runs has another place for the versions that vLLM reads."""
    composed = [compose["services"]["inference-gpu"]]
    for service in composed:
        writable = [volume.split(":")[1] for volume in service["volumes"] if not volume.endswith(":ro")]
        assert service["environment"]["FLEETBUS_INFERENCE_SCRATCH"] in writable
        assert "runs:/runs:ro" in service["volumes"]
    for pod in pods():
        for container in pod["containers"]:
            if container["image"] == "fleetbus/inference-vllm":
                variables = {each["name"]: each["value"] for each in container["env"]}
                writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
                assert variables["FLEETBUS_INFERENCE_SCRATCH"] in writable


def test_each_service_with_a_gpu_names_it(compose: dict[str, Any]) -> None:
    """With a count every container would be given the first one."""
    for name in ("inference-gpu", "learner-gpu"):
        (device,) = compose["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] and "count" not in device


def test_an_image_without_gpus_is_not_built_with_a_torch_for_them() -> None:
    """An index that cannot be reached would be passed over, and another one's torch taken."""
    text = (ROOT / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    (stage,) = [each for each in stages if "TORCH_INDEX:+" in each]
    assert "torch.version.cuda is None" in stage.partition("TORCH_INDEX:+")[2]
    assert text.count("torch.version.cuda") == 1


def test_images_for_gpus_have_a_compiler_and_a_torch_with_cuda() -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    by_name = {stage.split(" AS ")[1].split("\n")[0]: stage for stage in stages if " AS " in stage}
    assert "gcc" in by_name["gpu"]
    for name in ("learner-gpu", "inference-vllm"):
        assert by_name[name].startswith("gpu AS") and "TORCH_INDEX" not in by_name[name]


def test_each_service_of_compose_mounts_its_own_key_read_only(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        keys = [volume for volume in service.get("volumes", []) if volume.startswith("keys")]
        if name == "keys":
            assert len(keys) == 7
        else:
            assert len(keys) == 1 and keys[0].endswith(":ro"), name


def test_nothing_is_published_beyond_loopback(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    services = {name: each["spec"] for name, each in documents() if each["kind"] == "Service"}
    published = {name for name, spec in services.items() if spec.get("type", "ClusterIP") != "ClusterIP"}
    assert published == {"sites.yaml"} and "  # - sites.yaml" in (MANIFESTS[0].parent / "kustomization.yaml").read_text()
    assert {each["port"] for each in services["sites.yaml"]["ports"]} == {LEAF_PORT}


def test_scaling_watches_the_consumer_that_environment_workers_pull_from() -> None:
    plan = plan_run("default")
    metadata = next(
        each["spec"]["triggers"][0]["metadata"]
        for name, each in documents()
        if (name, each["kind"]) == ("scaling.yaml", "ScaledObject")
    )
    assert metadata["stream"] == plan.log.name
    assert metadata["account"] == account_of("default")
    assert metadata["consumer"].removesuffix("-NAME") in {consumer.name for consumer in plan.consumers}
    assert int(metadata["lagThreshold"]) == EnvironmentSettings().slots


def test_a_pool_has_workers_and_a_scaler_of_its_own_as_the_others_have() -> None:
    found = {(name, each["kind"]): each for name, each in documents()}
    workers, pool = found["environment.yaml", "Deployment"], found["pool.yaml", "Deployment"]
    (own,) = (container.pop("env") for container in pool["spec"]["template"]["spec"]["containers"])
    assert own == [{"name": "FLEETBUS_ENVIRONMENT_POOLS", "value": "browser"}]
    workers["spec"]["replicas"] = pool["spec"]["replicas"]
    assert str(pool).replace("environment-browser", "environment") == str(workers)
    scaler = found["pool.yaml", "ScaledObject"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == pool["metadata"]["name"]
    assert scaler["spec"]["triggers"][0]["metadata"]["consumer"] == f"{tasks_consumer('browser')}-NAME"
    text = str(scaler).replace("task_browser", "task_default").replace("environment-browser", "environment")
    assert text == str(found["scaling.yaml", "ScaledObject"])


def test_every_role_has_probes_and_workers_have_those_of_the_file_that_they_touch() -> None:
    """`tests/system/test_alive_file.py` runs their commands."""
    settings = next(each["data"] for _, each in documents() if each["kind"] == "ConfigMap")
    for pod in pods():
        for container in pod["containers"]:
            if container["name"] == "init":
                continue  # ends by itself
            probes = {name: each for name, each in container.items() if name.endswith("Probe")}
            if container.get("ports"):
                assert {"readinessProbe", "livenessProbe"} <= set(probes), container["name"]
            else:
                assert set(probes) == {"startupProbe", "livenessProbe"}, container["name"]
                for probe in probes.values():
                    assert f"find {settings['FLEETBUS_LOG_ALIVE']} -mmin -" in probe["exec"]["command"][-1]


def test_every_image_says_how_its_health_is_checked(targets: set[str]) -> None:
    stages = {each.split(" AS ")[1].split("\n")[0]: each for each in (ROOT / "Dockerfile").read_text().split("\nFROM ")[1:]}
    started = {name for name, stage in stages.items() if "ENTRYPOINT" in stage} - {"inference"}  # which has its parent's
    assert {name for name, stage in stages.items() if "HEALTHCHECK" in stage} == started <= targets
    for name in started:
        (check,) = re.findall(r"^HEALTHCHECK (.*)$", stages[name], flags=re.MULTILINE)
        if "find " in check:
            assert f"ENV FLEETBUS_LOG_ALIVE={check.split('find ')[1].split()[0]}" in stages[name]


def test_drains_of_nodes_leave_a_part_of_each_role_that_others_take_over_from() -> None:
    budgets = {each["metadata"]["name"]: each["spec"] for _, each in documents() if each["kind"] == "PodDisruptionBudget"}
    assert set(budgets) == {"nats", "environment", "environment-browser", "inference"}
    for name, budget in budgets.items():
        assert budget["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}


def test_prometheus_finds_the_metrics_and_its_operator_takes_the_alert_rules_as_the_page_says() -> None:
    found = {(name, each["kind"]): each for name, each in documents()}
    service, monitor = found["metrics.yaml", "Service"], found["prometheus.yaml", "ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {each["port"] for each in monitor["endpoints"]} == {each["name"] for each in service["spec"]["ports"]}
    page = (ROOT / "docs" / "cluster.md").read_text()
    (command,) = re.findall(r"^\$ (.*PrometheusRule.*) \| kubectl apply -f -$", page, flags=re.MULTILINE)
    made = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True, text=True, timeout=20).stdout
    rule = yaml.safe_load(made)
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())


def test_the_servers_take_their_routes_from_the_configuration_which_has_their_password() -> None:
    """``--cluster`` on the command line forgets it."""
    (server,) = (pod for pod in pods() if any(each["name"] == "nats" for each in pod["containers"]))
    arguments = server["containers"][0]["args"]
    assert "-c=/auth/nats-server.conf" in arguments
    assert not [each for each in arguments if each.lstrip("-").startswith(("cluster", "routes"))]
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert page.count("--route nats-") == 3 and "--from-file=keys/cluster.conf" in page


def test_the_cluster_page_names_commands_and_files_that_exist() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    assert set(re.findall(r"^\$ fleetbus ([a-z]+)", text, flags=re.MULTILINE)) <= set(COMMANDS)
    for file in re.findall(r"deploy/[\w./-]+\w", text):
        assert (ROOT / file).exists(), file
