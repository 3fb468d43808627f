"""Prints the pods that KubeSpawner makes from values of Zero to JupyterHub, as a JSON object by
profile: pods.py VALUES

The chart's jupyterhub_config.py assigns each key below `singleuser` to a trait of KubeSpawner. These
are the keys that config/jupyterhub/values.yaml and docs/jupyterhub.md use; any other is an error.
"""

import asyncio
import json
import sys
import tempfile

import yaml
from kubernetes_asyncio import client
from kubernetes_asyncio.config import kube_config
from kubespawner import KubeSpawner
from traitlets.config import Config

TRAITS = {
    ("extraAnnotations",): "extra_annotations",
    ("extraPodConfig",): "extra_pod_config",
    ("extraEnv",): "environment",
    ("memory", "limit"): "mem_limit",
    ("memory", "guarantee"): "mem_guarantee",
    ("extraResource", "limits"): "extra_resource_limits",
    ("extraResource", "guarantees"): "extra_resource_guarantees",
    ("profileList",): "profile_list",
}
# Settings of the culler, which the hub starts with them as options.
CULL = {"enabled", "timeout", "every", "concurrency", "users", "adminUsers", "maxAge"}


# KubeSpawner reads a kubeconfig, and connects to no cluster until it starts a pod.
NO_CLUSTER = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "none",
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
    "clusters": [{"name": "none", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "none", "user": {}}],
}


def settings(values):
    """The configuration of KubeSpawner."""
    config = Config()
    unknown = set(values) - {"singleuser", "cull"} or set(values.get("cull", {})) - CULL
    assert not unknown, f"values that the chart does not pass on: {unknown}"
    pending = [((), values.get("singleuser", {}))]
    while pending:
        path, node = pending.pop()
        if path in TRAITS:
            config.KubeSpawner[TRAITS[path]] = node
            continue
        assert isinstance(node, dict) and len(path) < 2, f"unknown value singleuser.{'.'.join(path)}"
        pending += [((*path, key), child) for key, child in node.items()]
    return config


async def pod(config, profile):
    spawner = KubeSpawner(_mock=True, config=config)
    spawner.user_options = {"profile": profile} if profile else {}
    await spawner.load_user_options()
    manifest = await spawner.get_pod_manifest()
    return client.ApiClient().sanitize_for_serialization(manifest)


async def main(path):
    with open(path, encoding="utf-8") as file:
        config = settings(yaml.safe_load(file))
    profiles = [p["display_name"] for p in config.KubeSpawner.get("profile_list", [])]
    slug = lambda name: "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
    pods = {}
    for name in profiles or [""]:
        pods[name] = await pod(config, slug(name).replace("--", "-"))
    print(json.dumps(pods, indent=1))


with tempfile.NamedTemporaryFile("w", suffix=".json") as kubeconfig:
    json.dump(NO_CLUSTER, kubeconfig)
    kubeconfig.flush()
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = kubeconfig.name
    asyncio.run(main(sys.argv[1]))
