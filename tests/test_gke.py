"""scripts/gke: manifests against schemas of what they use, their keys against our programs, and one against another.

No cluster has seen them; this finds what can be found without one.
"""

import json
import math
import pathlib
import re
import string
import subprocess

import jsonschema
import pytest
import yaml

from conversion.options import Options
from MaxText.configs.k3_config import initialize

TESTS = pathlib.Path(__file__).parent
GKE = TESTS.parent / "scripts" / "gke"
SCHEMA = json.loads((TESTS / "gke_schemas.json").read_text())
MANIFESTS = sorted(GKE.glob("*.yaml"))
CHIPS_A_HOST = 4  # tpu7x-standard-4t
DEVICES_A_CHIP = 2  # of v7x


def documents(path: pathlib.Path) -> list[dict]:
  """A manifest as envsubst leaves it."""
  names = {"IMAGE": "registry/kimi-k3:1", "BUCKET": "weights", "DIRECTORY": "k3", "SOURCE_BUCKET": "released"}
  # As envsubst is called in the README: other dollar signs stay.
  text = re.sub(r"\$\{(\w+)\}", lambda m: names[m[1]], path.read_text())
  return list(yaml.safe_load_all(text))


def check(document: dict) -> None:
  jsonschema.Draft202012Validator(SCHEMA).validate(document)


@pytest.fixture(scope="module")
def serving():
  lws, service = documents(GKE / "serve.yaml")
  template = lws["spec"]["leaderWorkerTemplate"]
  return lws["spec"], service["spec"], template["leaderTemplate"], template["workerTemplate"]


def keys_of(args: list[str]) -> dict[str, str]:
  return dict(arg.split("=", 1) for arg in args)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_every_document_is_what_its_kind_has(path):
  assert "Not run on hardware" in path.read_text()
  for document in documents(path):
    check(document)


def test_the_schema_finds_mistakes():
  good = documents(GKE / "serve.yaml")[0]
  for change in (
    lambda d: d.update(kind="LeaderWorkerset"),
    lambda d: d["spec"].update(replica=1),
    lambda d: d["spec"]["leaderWorkerTemplate"].update(size="8"),
    lambda d: d["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"].update(nodeSelectors={}),
    lambda d: d["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0].update(image=""),
    lambda d: d["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["annotations"].update(x=True),
  ):
    bad = json.loads(json.dumps(good))
    change(bad)
    with pytest.raises(jsonschema.ValidationError):
      check(bad)


def test_the_slice_is_whole_and_the_same_everywhere(serving):
  spec, _, leader, worker = serving
  script = (GKE / "nodepool.sh").read_text()
  topology = re.search(r"^TOPOLOGY=(\S+)", script, re.M)[1]
  hosts = int(re.search(r"^HOSTS=(\d+)", script, re.M)[1])
  chips = math.prod(map(int, topology.split("x")))
  assert chips == 32
  assert hosts == spec["leaderWorkerTemplate"]["size"] == chips // CHIPS_A_HOST
  pool = re.search(r"POOL:-([\w-]+)", script)[1]
  for pod in (leader, worker):
    assert pod["spec"]["nodeSelector"] == {
      "cloud.google.com/gke-nodepool": pool,
      "cloud.google.com/gke-tpu-accelerator": "tpu7x",
      "cloud.google.com/gke-tpu-topology": topology,
    }
    (container,) = pod["spec"]["containers"]
    for kind in ("requests", "limits"):
      assert container["resources"][kind]["google.com/tpu"] == str(CHIPS_A_HOST)
  for flag in ("--reservation-affinity=none", "--flex-start", "--num-nodes=0", "--enable-autoscaling",
               "--placement-policy=", "--machine-type=tpu7x-standard-4t"):  # fmt: skip
    assert flag in script
  assert "workload-policy" in script
  assert "--accelerator-topology" in script


def test_every_host_runs_the_same_program_with_keys_that_it_has(serving):
  _, _, leader, worker = serving
  containers = [pod["spec"]["containers"][0] for pod in (leader, worker)]
  for part in ("image", "command", "args", "env", "volumeMounts"):
    assert containers[0][part] == containers[1][part]
  command, args = containers[0]["command"], containers[0]["args"]
  assert (TESTS.parent / command[1]).is_file()
  # Read as serve.py reads it: unknown keys and values that contradict each other are refused.
  config = initialize(["serve.py", command[2], *args])
  assert config.serve_host == "0.0.0.0"
  assert config.per_device_batch_size * 32 * DEVICES_A_CHIP == 64  # docs/planning.md: 64 × 128 K


def test_probes_ports_and_grace_match_the_server(serving):
  _, service, leader, worker = serving
  (container,) = leader["spec"]["containers"]
  keys = keys_of(container["args"])
  ports = {p["name"]: p["containerPort"] for p in container["ports"]}
  assert ports == {"http": int(keys["serve_http_port"]), "grpc": int(keys["serve_grpc_port"])}
  paths = {probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
  assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
  assert {p["targetPort"] for p in service["ports"]} == set(ports)
  assert service["selector"].items() <= leader["metadata"]["labels"].items()
  assert not service["selector"].items() <= worker["metadata"]["labels"].items()
  for pod in (leader, worker):
    # drain, then up to 5 s for the last words and 15 s until what hangs is ended (serve.py)
    assert pod["spec"]["terminationGracePeriodSeconds"] >= float(keys["serve_grace_seconds"]) + 20


def test_volumes_are_there_sized_and_without_a_file_cache(serving):
  _, _, leader, worker = serving
  pods = [leader, worker] + [d["spec"]["template"] for n in ("convert", "convert_finish")
                             for d in documents(GKE / f"{n}.yaml")]  # fmt: skip
  for pod in pods:
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    (container,) = pod["spec"]["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
    for volume in volumes.values():
      if "csi" in volume:
        assert "file-cache:max-size-mb:0" in volume["csi"]["volumeAttributes"]["mountOptions"].split(",")
        assert pod["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
      if "emptyDir" in volume:
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
  (shm,) = [m for m in leader["spec"]["containers"][0]["volumeMounts"] if m["name"] == "shm"]
  assert shm["mountPath"] == "/dev/shm"


def test_the_conversion_is_dealt_out_whole_and_finished_by_the_same_command():
  (job,), (finish,) = documents(GKE / "convert.yaml"), documents(GKE / "convert_finish.yaml")
  spec = job["spec"]
  assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
  containers = [d["spec"]["template"]["spec"]["containers"][0] for d in (job, finish)]
  assert (
    containers[0]["command"] == containers[1]["command"] == ["python", "-m", "conversion.convert", "/source", "/target"]
  )
  keys = keys_of(containers[0]["args"])
  assert keys.pop("worker_index") == "$(JOB_COMPLETION_INDEX)"
  assert int(keys.pop("worker_count")) == spec["completions"]
  assert keys == keys_of(containers[1]["args"])
  Options(**keys)  # refuses what it doesn't know
  for part in ("image", "volumeMounts", "resources"):
    assert containers[0][part] == containers[1][part]


def test_the_readme_names_each_file_and_each_gap():
  text = (GKE / "README.md").read_text()
  assert "Not run on hardware" in text
  for path in GKE.iterdir():
    assert path.name == "README.md" or f"`{path.name}`" in text
  for path in MANIFESTS:
    used = {name for _, _, name, _ in string.Template.pattern.findall(path.read_text()) if name}
    (line,) = [line for line in text.splitlines() if line.startswith("envsubst") and f" {path.name} " in line]
    assert set(re.findall(r"\$(\w+)", line)) == used, path.name


def test_the_script_parses():
  subprocess.run(["bash", "-n", str(GKE / "nodepool.sh")], check=True)
