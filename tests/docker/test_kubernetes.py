"""docker/kubernetes-job.json, the template of a Kubernetes work pool: what its jobs may do, and that it is whole."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.docker.compose import ROOT
from tests.docker.dockerfile import read_stages


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return json.loads((ROOT / "docker/kubernetes-job.json").read_text("utf-8"))


def test_every_variable_is_used_and_every_placeholder_is_a_variable(template):
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])
    assert set(template["variables"]["required"]) <= used


def test_the_deployments_job_variables_are_ones_that_it_knows(template):
    listed = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text("utf-8"))["deployments"]
    for deployment in listed:
        assert set(deployment["work_pool"]["job_variables"]) <= set(template["variables"]["properties"])


def test_a_job_runs_as_the_images_user_and_writes_to_its_volumes_alone(template):
    (user,) = read_stages()[-1].values("USER")
    spec = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    context = spec["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert context["runAsNonRoot"] is True
    assert context["fsGroup"] == context["runAsGroup"]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/scratch"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert spec["automountServiceAccountToken"] is False
