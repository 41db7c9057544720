"""deploy/: the manifest against KubeRay's schema and our own settings, the image against what it
must hold."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from pdserve.cluster import cli
from pdserve.cluster.app import ROUTER_SHUTDOWN_S, WORKER_SHUTDOWN_S
from pdserve.cluster.operate.cluster_file import checked
from pdserve.cluster.operate.ray_settings import settings

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy" / "rayservice.yaml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

Schema = dict[str, Any]


def an_object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """Nothing but these: a misspelt field, which Kubernetes would drop, is an error here."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def a_list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
QUANTITIES: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^[0-9]+(Ki|Mi|Gi|m)?$"},
}
# The part that our manifest uses of Kubernetes' core/v1 PodTemplateSpec.
PROBE = an_object(
    ("httpGet",),
    httpGet=an_object(("path", "port"), path=STRING, port=INTEGER),
    periodSeconds=INTEGER,
    timeoutSeconds=INTEGER,
    failureThreshold=INTEGER,
)
SECRET_KEY = an_object(("name", "key"), name=STRING, key=STRING, optional=BOOLEAN)
CONTAINER = an_object(
    ("name", "image", "resources"),
    name=STRING,
    image=STRING,
    ports=a_list(an_object(("containerPort",), name=STRING, containerPort=INTEGER)),
    env=a_list(
        an_object(
            ("name",), name=STRING, value=STRING, valueFrom=an_object(secretKeyRef=SECRET_KEY)
        )
    ),
    lifecycle=an_object(preStop=an_object(exec=an_object(command=a_list(STRING)))),
    startupProbe=PROBE,
    livenessProbe=PROBE,
    readinessProbe=PROBE,
    resources=an_object(("limits", "requests"), limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=a_list(an_object(("name", "mountPath"), name=STRING, mountPath=STRING)),
)
POD = an_object(
    ("containers",),
    terminationGracePeriodSeconds=INTEGER,
    nodeSelector=STRINGS,
    tolerations=a_list(an_object(key=STRING, operator=STRING, effect=STRING)),
    containers=a_list(CONTAINER),
    volumes=a_list(
        an_object(("name",), name=STRING, emptyDir=an_object(medium=STRING, sizeLimit=STRING))
    ),
)
TEMPLATE = an_object(("spec",), spec=POD)
# The part that it uses of ray.io/v1 RayService: ray-project/kuberay,
# ray-operator/apis/ray/v1/rayservice_types.go and raycluster_types.go (the CRD
# helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml is made from these), as of KubeRay 1.5.
SCHEMA = an_object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=an_object(("name",), name=STRING),
    spec=an_object(
        ("rayClusterConfig",),
        serveConfigV2=STRING,
        excludeHeadPodFromServeSvc=BOOLEAN,
        rayClusterConfig=an_object(
            ("headGroupSpec",),
            rayVersion=STRING,
            authOptions=an_object(mode={"enum": ["disabled", "token"]}),
            headGroupSpec=an_object(("template",), rayStartParams=STRINGS, template=TEMPLATE),
            workerGroupSpecs=a_list(
                an_object(
                    ("groupName", "minReplicas", "maxReplicas", "template"),
                    groupName=STRING,
                    replicas=INTEGER,
                    minReplicas=INTEGER,
                    maxReplicas=INTEGER,
                    rayStartParams=STRINGS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load(MANIFEST.read_text())


def groups(manifest: Any) -> dict[str, Any]:
    """Worker groups by name."""
    made = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {group["groupName"]: group for group in made}


def pods(manifest: Any) -> list[Any]:
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]
    return [group["template"]["spec"] for group in (head, *groups(manifest).values())]


def test_the_manifest_is_a_ray_service(manifest: Any) -> None:
    validator = Draft202012Validator(SCHEMA)
    validator.validate(manifest)
    manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] = 4
    with pytest.raises(ValidationError, match="4 is not of type 'string'"):
        validator.validate(manifest)


def test_what_is_served_is_what_up_prints(
    manifest: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the options that the manifest's head names."""
    for name, value in settings(haproxy=False).items():  # which `up` sets for good
        monkeypatch.setenv(name, value)
    lines = [line.removeprefix("#") for line in MANIFEST.read_text().splitlines()]
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("pdserve up"))
    end = next(i for i in range(start, len(lines)) if not lines[i].endswith("\\"))
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines[start : end + 1]))
    assert words[:2] == ["pdserve", "up"] and words[-1] == "--print-yaml"
    assert cli.main(words[1:]) == 0
    assert capsys.readouterr().out == manifest["spec"]["serveConfigV2"]


def test_nodes_have_the_labels_and_gpus_that_the_application_wants(manifest: Any) -> None:
    config = checked(yaml.safe_load(manifest["spec"]["serveConfigV2"]), "serveConfigV2").config
    for name, wanted in (
        ("ingress", config.router),
        ("prefill", config.prefill),
        ("decode", config.decode),
    ):
        group = groups(manifest)[name]
        key, _, value = group["rayStartParams"]["labels"].partition("=")
        assert wanted.labels == {key: value}
        assert group["replicas"] == wanted.replicas
        [container] = group["template"]["spec"]["containers"]
        gpus = float(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert gpus == getattr(wanted, "num_gpus", 0)
        assert group["template"]["spec"]["nodeSelector"] == {"pdserve/pool": name}


def test_probes_and_time_to_end(manifest: Any) -> None:
    """The head has no probe of ours: KubeRay deploys what would answer it once the head is
    ready."""
    config = checked(yaml.safe_load(manifest["spec"]["serveConfigV2"]), "serveConfigV2").config
    drain_s = config.router.drain_s
    head, *workers = pods(manifest)
    assert not any(name.endswith("Probe") for name in head["containers"][0])
    for pod in workers:
        assert pod["containers"][0]["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8000}
    ingress = groups(manifest)["ingress"]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "livenessProbe"):
        assert ingress[probe]["httpGet"] == {"path": "/live", "port": 8000}
    assert ingress["startupProbe"]["failureThreshold"] * 10 >= config.placement_deadline_s
    for pod in (head, *workers):
        [container] = pod["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", f"{drain_s:g}"]
        slack = max(ROUTER_SHUTDOWN_S, WORKER_SHUTDOWN_S)
        assert pod["terminationGracePeriodSeconds"] > drain_s + slack


def test_every_pod_has_the_token_from_the_secret(manifest: Any) -> None:
    key = {"name": "pdserve-hub", "key": "token", "optional": True}
    for pod in pods(manifest):
        [container] = pod["containers"]
        assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}} in container["env"]


def test_the_image_has_rays_settings_and_what_the_package_is_built_from() -> None:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if line.startswith("ENV ")]
    env = dict(word.split("=", 1) for word in line.removeprefix("ENV ").split())
    wanted = settings(haproxy=False)
    del wanted["RAY_AUTH_MODE"]  # KubeRay's authOptions, or `pdserve up`
    assert wanted.items() <= env.items()
    copied = {
        source
        for line in text.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "pdserve", "demo/pdserve-demo"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    [torch] = re.findall(r'^  "(torch>=.*)",$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f'"{torch}"' in text
