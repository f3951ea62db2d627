"""The manifests for Kubernetes, by their shape: there is no cluster here to run them in."""

import re

import pytest

from tests.container_files import MANIFESTS, documents


def workloads():
    """The pods of the manifests: the file's documents, the name, the template."""
    for path in MANIFESTS:
        found = documents(path)
        for document in found:
            if "template" in document.get("spec", {}):
                name = document["metadata"]["name"]
                yield pytest.param(found, document["spec"]["template"], id=f"{path.stem}-{name}")


def containers(template):
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


@pytest.mark.parametrize(("_found", "template"), list(workloads()))
def test_pods_may_do_no_more_than_they_need(_found, template):
    pod = template["spec"]

    assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(template):
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        for mount in container["volumeMounts"]:
            assert mount["mountPath"].startswith(("/var/lib/", "/run/", "/tmp"))


@pytest.mark.parametrize(("_found", "template"), list(workloads()))
def test_pods_are_watched_and_have_their_share(_found, template):
    for container in containers(template):
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert "livenessProbe" in container
        assert container.keys() & {"startupProbe", "readinessProbe"}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if (probe := container.get(name)) is not None:
                assert len(probe.keys() & {"exec", "httpGet"}) == 1
                # The second that is the default is too little for a busy machine.
                assert probe["timeoutSeconds"] > 1
    volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
    mounts = {
        mount["name"] for container in containers(template) for mount in container["volumeMounts"]
    }
    assert mounts - volumes <= {"state"}  # which has a claim
    assert volumes <= mounts


@pytest.mark.parametrize(("found", "template"), list(workloads()))
def test_nobody_reaches_a_pod_but_who_has_to(found, template):
    labels = template["metadata"]["labels"].items()
    policies = [
        document["spec"]
        for document in found
        if document["kind"] == "NetworkPolicy"
        and document["spec"]["podSelector"]["matchLabels"].items() <= labels
    ]
    ports = {
        port["containerPort"]
        for container in containers(template)
        for port in container.get("ports", [])
    }

    [policy] = policies
    assert "Ingress" in policy["policyTypes"]
    opened = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert opened == ports
    for rule in policy["ingress"]:
        assert all(peer["podSelector"]["matchLabels"] for peer in rule["from"])
    if ports:  # a lock server: it makes no connections, but for a cluster's to etcd
        assert "Egress" in policy["policyTypes"]
        env = {variable["name"] for variable in template["spec"]["containers"][0]["env"]}
        assert bool(policy["egress"]) is ("DFLOCKD_CLUSTER" in env)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_services_that_a_manifest_needs_and_does_not_start_are_named_at_its_top(path):
    found = documents(path)
    own = {each["metadata"]["name"] for each in found}
    urls = re.findall(
        r"[a-z]+://([a-z0-9.-]+):", " ".join(re.findall(r'"([^"]*)"', path.read_text()))
    )
    hosts = {host.rpartition(".")[2] for host in urls} - own
    top = path.read_text().partition("apiVersion")[0]

    assert hosts <= {"redis", "etcd"}
    assert "redis" not in hosts or 'a Service "redis" in the namespace' in top
    assert "etcd" not in hosts or "which is not part of this" in top
    assert hosts


def test_clients_of_the_lock_server_carry_the_label_that_its_policy_asks_for():
    for path in MANIFESTS:
        for document in documents(path):
            template = document.get("spec", {}).get("template")
            if template is not None and "locks-0.locks:6388" in str(containers(template)):
                labels = template["metadata"]["labels"]
                assert labels.get("locks") == "client" or labels["app"] == "locks"
