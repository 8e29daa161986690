"""Pods of a JobSet find each other by the variables of the manifest in docs/clusters.md, and by that of Kubernetes."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from spawning import ON_CPU

CLUSTERS = Path(__file__).parents[2] / "docs" / "clusters.md"
PROGRAM = """
import jax, multimesh as mm
job = mm.distributed.initialize()
print(job.launcher, job.rank, len(job.hosts), jax.local_device_count(), flush=True)
mm.distributed.barrier("end")
"""


@pytest.mark.multiprocess
@pytest.mark.stand_in("processes with the variables that a kubelet gives, and localhost for the name of a pod")
def test_pods_of_the_manifest_are_one_job(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", CLUSTERS.read_text(encoding="utf-8"), re.DOTALL)
    jobset = yaml.safe_load(text)
    (part,) = jobset["spec"]["replicatedJobs"]
    job = part["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    count = job["parallelism"]
    assert job["completionMode"] == "Indexed"
    assert variables["MULTIMESH_PROCESSES"] == str(count) == str(job["completions"])
    host, _, port = variables["JAX_COORDINATOR_ADDRESS"].partition(":")
    assert (host, port.isdigit()) == ("{1}-{0}-0-0.{1}".format(part["name"], jobset["metadata"]["name"]), True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables["JAX_COORDINATOR_ADDRESS"] = f"localhost:{server.getsockname()[1]}"
    (tmp_path / "train.py").write_text(PROGRAM)
    env = ON_CPU | variables | {"JAX_NUM_CPU_DEVICES": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    pods = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            env=env | {"JOB_COMPLETION_INDEX": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    outputs = [pod.communicate(timeout=100)[0].splitlines() for pod in pods]
    assert outputs == [[f"Kubernetes {rank} {count} 2"] for rank in range(count)]
