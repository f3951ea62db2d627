"""What the tests of the files that containers are made from have in common."""

import re

import yaml

from examples.demo import stage

ROOT = stage.ROOT
COMPOSE = [ROOT / "docker-compose.yml", ROOT / "examples/cluster/docker-compose.yml"]
MANIFESTS = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
DOCKERFILES = sorted(ROOT.glob("*/Dockerfile"))


# Written in C, where the wheel has it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(path):
    return list(yaml.load_all(path.read_text(), LOADER))


def nested(value):
    """Every mapping in a document."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from nested(inner)


def environments(path):
    """Every variable that a file gives to a container."""
    for document in documents(path):
        for mapping in nested(document):
            if isinstance(mapping.get("environment"), dict):
                yield from mapping["environment"].items()
            for variable in mapping.get("env", []):
                yield variable["name"], variable.get("value", "")


def logical_lines(name):
    """The lines of a file of requirements, joined where they go on, without comments."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pins(name):
    lines = [re.split("[;#]| --hash=", line)[0] for line in logical_lines(name)]
    found = (re.match(r"([\w-]+)(?:\[.*\])?==(\S+)\s*$", line) for line in lines if line.strip())
    return {match[1].lower().replace("_", "-"): match[2] for match in found}
