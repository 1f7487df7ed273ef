"""deploy/kubernetes: manifests that a cluster takes, and that say the same as the code."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import redis
import yaml
from torch.distributed.run import get_args_parser

import kustomize
from penstock.deploy.grafana.__main__ import DASHBOARDS, FOLDER
from penstock.deploy.images import healthy
from penstock.deploy.images.hand_out import hand_out
from penstock.deploy.prometheus.__main__ import FILE, generated
from penstock.deploy.prometheus.command import RULES
from penstock.deploy.security.acl import ROLES, acl_file, user_name, user_names
from penstock.producers.loop import GRACE_S, SHUTDOWN_TIMEOUT_S
from penstock.schemas.config import MetricsConfig, RunConfig, load_config
from penstock.schemas.keys import PRODUCERS_GROUP, Keys
from penstock.schemas.process.redis_url import PASSWORD_FILE, URL
from real_server import RealServer

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
OVERLAYS = ("cpu", "gpu", "gpu-nodes")
VERSIONS = ("1.31", "1.37")
RUN = "demo"
NAMESPACE = "penstock"

PARTS = (("Job", "trainer"), ("Deployment", "producer"))
INDEX = "batch.kubernetes.io/job-completion-index"
"""The label that Kubernetes gives the pods of an Indexed Job."""
HEALTHY = Path(healthy.__file__).relative_to(ROOT)
SPOT = (
    {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
    {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot", "effect": "NoSchedule"},
)
"""Tolerations of the taints that GKE and AKS give their spot nodes."""

Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Path:
    return KUBERNETES / "overlays" / request.param


@pytest.fixture
def objects(overlay: Path) -> Objects:
    return {kustomize.identity(each): each for each in kustomize.load(overlay)}


@pytest.fixture
def config(overlay: Path) -> RunConfig:
    return load_config(overlay / "run.toml")


def container(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    return next(each for each in objects[kind, name]["spec"]["template"]["spec"]["containers"])


def pod(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    template: dict[str, Any] = objects[kind, name]["spec"]["template"]
    return template


def is_selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """As far as the manifests' selectors go."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_every_object_is_one_that_a_cluster_takes(objects: Objects) -> None:
    for (kind, _), each in objects.items():
        schema = SCHEMAS / f"{kind}.json"
        if schema.exists():
            jsonschema.validate(each, json.loads(schema.read_text()))
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


def test_every_file_is_listed_by_the_kustomization_of_its_folder() -> None:
    folders = [KUBERNETES / "base", *(KUBERNETES / "overlays" / name for name in OVERLAYS)]
    for folder in folders:
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
        names = [name for name in listed["resources"] if not name.startswith("..")]
        names += [patch["path"] for patch in listed.get("patches", [])]
        names += [name for each in listed.get("configMapGenerator", []) for name in each["files"]]
        assert sorted([*names, "kustomization.yaml"]) == sorted(file.name for file in folder.iterdir())
    assert {path.parent for path in KUBERNETES.rglob("*") if path.is_file()} == set(folders)


def test_kubectl_makes_the_same_of_an_overlay(overlay: Path, objects: Objects) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    text = subprocess.run([kubectl, "kustomize", str(overlay)], check=True, capture_output=True, text=True).stdout
    made = {kustomize.identity(each): each for each in yaml.safe_load_all(text)}
    (run_file,) = (name for _, name in made if name.startswith("run-file"))  # with a hash of its content

    def plain(each: dict[str, Any]) -> str:
        return json.dumps(each, sort_keys=True).replace(run_file, "run-file")

    for each in objects.values():  # one of its labels is put on everything
        _label(each)
    assert {plain(each) for each in made.values()} == {plain(each) for each in objects.values()}


def _label(each: dict[str, Any]) -> None:
    spec = each.get("spec", {})
    holders = [each, *spec.get("volumeClaimTemplates", [])]
    if kustomize.identity(each) != ("ConfigMap", "run-file"):  # made by the overlay
        holders += [spec["template"]] if isinstance(spec.get("template"), dict) else []
        for holder in holders:
            holder["metadata"].setdefault("labels", {})["app.kubernetes.io/part-of"] = "penstock"


def test_producers_are_scaled_by_the_stream_and_group_that_the_run_has(objects: Objects, config: RunConfig) -> None:
    scaled = objects["ScaledObject", "producer"]["spec"]
    assert ("Deployment", scaled["scaleTargetRef"]["name"]) in objects
    by_name = {trigger["name"]: trigger["metadata"] for trigger in scaled["triggers"]}
    assert {metadata["stream"] for metadata in by_name.values()} == {Keys(config.name).prompts}
    assert by_name["lag"]["consumerGroup"] == PRODUCERS_GROUP
    assert int(by_name["lag"]["lagCount"]) > 0
    assert int(by_name["open"]["streamLength"]) == config.producers.groups_in_flight
    assert "replicas" not in objects["Deployment", "producer"]["spec"]
    # More producers than the credit can occupy would wait for prompts.
    assert scaled["maxReplicaCount"] <= -(-config.credit // int(by_name["lag"]["lagCount"]))
    assert int(by_name["lag"]["activationLagCount"]) > 0  # KEDA 2.16 takes 0, its default as well, for a missing value
    assert "consumerGroup" not in by_name["open"]  # by length, active from the first entry on
    assert {each["metadata"].get("namespace") for each in objects.values()} == {NAMESPACE}
    (port,) = objects["Service", "redis"]["spec"]["ports"]
    assert {each["address"] for each in by_name.values()} == {f"redis.{NAMESPACE}.svc.cluster.local:{port['port']}"}


def test_producers_alone_may_be_drained_by_half_and_put_on_spot_nodes(overlay: Path, objects: Objects) -> None:
    (budget,) = (each["spec"] for (kind, _), each in objects.items() if kind == "PodDisruptionBudget")
    assert budget["maxUnavailable"] == "50%"  # rounded up: one of one may go
    for kind, name in objects:
        if kind in ("Job", "Deployment", "StatefulSet"):
            template, is_producer = pod(objects, kind, name), name == "producer"
            assert is_selected(budget["selector"], template["metadata"]["labels"]) == is_producer
            tolerated = template["spec"].get("tolerations", [])
            assert [each for each in SPOT if each in tolerated] == list(SPOT) * is_producer
            on_gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
            assert (on_gpu in tolerated) == (overlay.name != "cpu" and (kind, name) in PARTS)


def test_the_rules_in_the_cluster_are_the_rules_of_prometheus(objects: Objects) -> None:
    assert FILE.read_text(encoding="utf-8") == generated()[FILE], "run `python -m penstock.deploy.prometheus`"
    for file in RULES.glob("*.yml"):
        rules = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert objects["PrometheusRule", f"penstock-{file.stem}"]["spec"] == rules
    assert len([kind for kind, _ in objects if kind == "PrometheusRule"]) == len(list(RULES.glob("*.yml")))


def test_every_dashboard_is_in_a_config_map_that_the_sidecar_looks_for(objects: Objects) -> None:
    maps = [each for (kind, name), each in objects.items() if kind == "ConfigMap" and name != "run-file"]
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
    found = {name: text for each in maps for name, text in each["data"].items()}
    assert found == {name: (FOLDER / name).read_text(encoding="utf-8") for name in DASHBOARDS}
    # The annotation in which `kubectl apply` keeps a copy.
    assert all(len(json.dumps(each)) < 256 * 1024 for each in maps)


def test_each_part_has_its_own_user_its_own_password_and_the_runs_name(objects: Objects, config: RunConfig) -> None:
    assert config.name == RUN
    for kind, name, role in (*((*part, part[1]) for part in PARTS), ("Deployment", "penstock", "operator")):
        part = container(objects, kind, name)
        variables = environment(part)
        assert variables[URL] == f"redis://{user_name(RUN, role)}@redis:6379"
        assert variables.get("RUN", RUN if role == "operator" else None) == RUN
        mount = Path(variables[PASSWORD_FILE])
        volume = next(each["name"] for each in part["volumeMounts"] if each["mountPath"] == str(mount.parent))
        volumes = pod(objects, kind, name)["spec"]["volumes"]
        secret = next(each["secret"]["secretName"] for each in volumes if each["name"] == volume)
        assert (mount.name, secret) == ("password", f"penstock-{role}")
    exporter = environment(container(objects, "Deployment", "redis-exporter"))
    assert exporter["REDIS_USER"] == user_name(RUN, "observer")
    assert user_name(RUN, "observer") in json.dumps(objects["StatefulSet", "redis"])


def test_what_manifests_take_from_secrets_is_what_hand_out_writes(objects: Objects, tmp_path: Path) -> None:
    hand_out(RUN, tmp_path / "passwords", tmp_path / "handout", "redis:6379")
    text = json.dumps(list(objects.values()))
    assert "Secret" not in {kind for kind, _ in objects}  # by reference only
    for secret, part in (("redis-acl", "redis"), *((part, part) for part in ROLES)):
        assert f'"secretName": "penstock-{secret}"' in text
        assert list((tmp_path / "handout" / part).iterdir())
    keys = objects["TriggerAuthentication", "redis-observer"]["spec"]["secretTargetRef"]
    for each in keys:
        assert each["name"] == "penstock-observer"
        assert (tmp_path / "handout" / "observer" / each["key"]).is_file()
    accepted = json.loads((tmp_path / "handout" / "observer" / "exporter.json").read_text())
    variables = environment(container(objects, "Deployment", "redis-exporter"))
    assert variables["REDIS_ADDR"] in accepted
    assert Path(variables["REDIS_PASSWORD_FILE"]).name == "exporter.json"


def test_metrics_are_looked_for_where_they_are_served(objects: Objects) -> None:
    port = MetricsConfig().port
    for kind, role in PARTS:
        part = container(objects, kind, role)
        assert part["ports"] == [{"name": "metrics", "containerPort": port}]
        spec = objects[kind, role]["spec"]
        is_first = {INDEX: "0"} if spec.get("completionMode") == "Indexed" else {}  # rank 0 alone has metrics
        for probe in (part["livenessProbe"], part["startupProbe"]):
            if is_first:
                assert "httpGet" not in probe and f":{port}/metrics" in healthy.URL
                assert str(Path("/opt/penstock") / HEALTHY) in probe["exec"]["command"][2]
            else:
                assert probe["httpGet"] == {"path": "/metrics", "port": "metrics"}
        service = objects["Service", f"penstock-{role}"]
        assert service["spec"]["ports"] == [{"name": "metrics", "port": port}]
        # The job's name, which rules and dashboards know.
        assert service["metadata"]["labels"]["penstock.dev/job"] == f"penstock-{role}"
        labels = spec["template"]["metadata"]["labels"] | is_first
        assert is_first.items() <= service["spec"]["selector"].items() <= labels.items()
    monitor = objects["ServiceMonitor", "penstock"]["spec"]
    assert monitor["jobLabel"] == "penstock.dev/job"
    assert [endpoint["honorLabels"] for endpoint in monitor["endpoints"]] == [True]
    allowed = objects["NetworkPolicy", "metrics"]["spec"]["ingress"][0]["ports"]
    assert port in {each["port"] for each in allowed}


def test_a_pod_that_is_asked_to_stop_gets_the_time_it_needs(objects: Objects) -> None:
    producer = objects["Deployment", "producer"]["spec"]["template"]["spec"]
    assert producer["terminationGracePeriodSeconds"] >= 2 * (GRACE_S + SHUTDOWN_TIMEOUT_S)
    assert objects["Job", "trainer"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 120


def test_whoever_asks_redis_is_let_out_to_it_and_in(objects: Objects) -> None:
    (ingress,) = objects["NetworkPolicy", "redis"]["spec"]["ingress"]
    policy = objects["NetworkPolicy", "to-redis"]["spec"]
    egress = policy["podSelector"]
    (names,) = (each for each in policy["egress"] if {port["port"] for port in each["ports"]} == {53})
    assert "to" not in names, "NodeLocal DNSCache answers at an address of the node"
    askers = [
        key for key in objects if key[0] in ("Job", "Deployment") and "redis:6379" in json.dumps(pod(objects, *key))
    ]
    assert len(askers) == 4
    for key in askers:
        labels = pod(objects, *key)["metadata"]["labels"]
        assert is_selected(egress, labels), key
        assert any(is_selected(each["podSelector"], labels) for each in ingress["from"] if "podSelector" in each), key


def test_a_producer_joins_by_redis_alone_and_has_room_for_its_copy_of_the_policy(
    overlay: Path, objects: Objects, config: RunConfig
) -> None:
    part, spec = container(objects, "Deployment", "producer"), pod(objects, "Deployment", "producer")["spec"]
    assert "args" not in part  # producer.sh joins the run of the name in RUN
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounts = {each["mountPath"]: each for each in part["volumeMounts"]}
    assert environment(part)["RUNS"].startswith("/tmp/") and "emptyDir" in volumes[mounts["/tmp"]["name"]]
    on_the_volume = [value for value in config.environment.kwargs.values() if str(value).startswith("/runs/")]
    if on_the_volume:
        assert mounts["/runs"]["readOnly"] and volumes["runs"]["persistentVolumeClaim"]["readOnly"]
    else:
        assert "runs" not in volumes
    memory = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
    assert memory["medium"] == "Memory"
    parameters = {"gpu": 4.02e9, "gpu-nodes": 14.8e9}.get(overlay.name, 1e6)
    room = gibibytes(memory["sizeLimit"])
    assert room > parameters * 2 / 2**30
    assert room < gibibytes(part["resources"]["limits"]["memory"])


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


@pytest.mark.parametrize("name", ["gpu", "gpu-nodes"])
def test_a_trainer_waits_until_its_model_and_its_data_are_there(name: str, tmp_path: Path) -> None:
    overlay = KUBERNETES / "overlays" / name
    objects = {kustomize.identity(each): each for each in kustomize.load(overlay)}
    config = load_config(overlay / "run.toml")
    wanted = [config.model.path, *(value for value in config.environment.kwargs.values() if "/runs/" in str(value))]
    assert len(wanted) == 3
    (waiting,) = pod(objects, "Job", "trainer")["spec"]["initContainers"]
    (script,) = waiting["args"]
    script = script.replace("/runs", str(tmp_path / "runs")).replace("sleep 2", "sleep 0.05")
    process = subprocess.Popen([*waiting["command"], script], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            for path in wanted:
                assert process.poll() is None
                assert process.stdout.readline() == f"waiting for {tmp_path}{path}, to be put onto the volume\n"
                Path(f"{tmp_path}{path}").mkdir(parents=True)
            assert process.wait(30) == 0
        finally:
            process.kill()
    stopped = subprocess.Popen([*waiting["command"], script.replace("/runs", "/none")], stdout=subprocess.PIPE)
    with stopped:
        assert stopped.stdout is not None and stopped.stdout.readline()
        stopped.terminate()  # a shell that is the container's first process would not end by itself
        assert stopped.wait(30) == 143


def test_no_container_is_root_or_may_become_it_and_each_says_what_it_needs(objects: Objects) -> None:
    for each in objects.values():
        for part in kustomize.containers(each):
            spec = each["spec"]["template"]["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True and spec["automountServiceAccountToken"] is False
            assert part["securityContext"]["allowPrivilegeEscalation"] is False
            assert part["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert part["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert not part["image"].endswith(":latest") and ":" in part["image"]


def test_a_producer_has_one_gpu_and_a_pod_of_the_trainer_one_for_each_of_its_ranks(
    overlay: Path, objects: Objects
) -> None:
    for kind, role in PARTS:
        part = container(objects, kind, role)
        ranks = environment(part).get("PET_NPROC_PER_NODE", "1")
        assert part["resources"]["limits"].get("nvidia.com/gpu") == (None if overlay.name == "cpu" else ranks)


def test_the_nodes_of_a_trainer_find_and_reach_each_other() -> None:
    objects = {kustomize.identity(each): each for each in kustomize.load(KUBERNETES / "overlays" / "gpu-nodes")}
    job, service = objects["Job", "trainer"]["spec"], objects["Service", "trainer-ranks"]["spec"]
    labels = pod(objects, "Job", "trainer")["metadata"]["labels"]
    options = {
        name: value for name, value in environment(container(objects, "Job", "trainer")).items() if "PET_" in name
    }
    # torchrun takes its own options from variables of these names.
    assert {name.removeprefix("PET_").lower() for name in options} <= vars(get_args_parser().parse_args(["x"])).keys()
    assert int(options["PET_NNODES"]) == job["completions"] == job["parallelism"] > 1
    assert options["PET_RDZV_ENDPOINT"].partition(":")[0] == f"trainer-0.{job['template']['spec']['subdomain']}"
    assert job["template"]["spec"]["subdomain"] == "trainer-ranks"
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert is_selected({"matchLabels": service["selector"]}, labels)
    policy = objects["NetworkPolicy", "trainer-ranks"]["spec"]
    for way, peers in (("ingress", "from"), ("egress", "to")):
        (rule,) = policy[way]
        assert "ports" not in rule and [is_selected(each["podSelector"], labels) for each in rule[peers]] == [True]
    assert is_selected(policy["podSelector"], labels)
    assert int(options["PET_SHUTDOWN_TIMEOUT"]) < job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]} and job["podReplacementPolicy"] == "Failed"


@pytest.mark.redis
def test_the_observer_may_ask_what_keda_asks_and_a_deleted_prompt_hides_no_lag(
    server_binary: Path, tmp_path: Path
) -> None:
    passwords = {name: f"password of {name}" for name in user_names([RUN])}
    (tmp_path / "users.acl").write_text(acl_file([RUN], passwords))
    server = RealServer(server_binary, "--aclfile", str(tmp_path / "users.acl"))
    try:

        def connect(user: str) -> redis.Redis:
            return redis.Redis(unix_socket_path=str(server.socket), username=user, password=passwords[user], protocol=2)

        prompts = Keys(RUN).prompts
        with connect("admin") as admin, connect(user_name(RUN, "observer")) as observer:
            assert "redis_version" in observer.info()
            entries = [admin.xadd(prompts, {"index": index}) for index in range(5)]
            assert observer.xlen(prompts) == 5  # before the first producer there is no group
            admin.xgroup_create(prompts, PRODUCERS_GROUP, id="0")
            admin.xreadgroup(PRODUCERS_GROUP, "producer", {prompts: ">"}, count=3)
            admin.xack(prompts, PRODUCERS_GROUP, *entries[:2])
            admin.xdel(prompts, *entries[:2])
            (group,) = observer.xinfo_groups(prompts)
            assert (group["name"], group["lag"], observer.xlen(prompts)) == (PRODUCERS_GROUP.encode(), 2, 3)
    finally:
        server.remove()
