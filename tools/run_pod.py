"""Run a Deployment's pod under podman, to try manifests without a cluster.

    python3 tools/run_pod.py deploy/kubernetes/mine

It needs podman, and kubectl, which renders the folder. The pod's ports are on 127.0.0.1, its log is
in the terminal, and Ctrl-C ends it. A container here differs from a pod: it has no probes, and no
limits of memory and CPU. An ``emptyDir`` is in memory. A claim is podman's volume of that name. A
key of a Secret is the variable of the same name in your shell.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Resource = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod of a Deployment.

    Attributes:
        spec: the pod's, as in the manifest.
        files: the files of each ConfigMap, with their contents.
    """

    spec: Resource
    files: Mapping[str, Mapping[str, str]]

    @property
    def container(self) -> Resource:
        """Its only container."""
        (container,) = self.spec["containers"]
        return dict(container)


def render(folder: Path) -> list[Resource]:
    """Return the resources of a kustomization.

    Raises:
        RuntimeError: kubectl is missing, or cannot render the folder.
    """
    rendered = _kubectl("", "kustomize", str(folder))
    # kubectl turns YAML into JSON only as part of something else: here, of removing an annotation
    # that no resource has.
    text = _kubectl(rendered, "annotate", "--local", "--output=json", "--filename=-", "none-")
    return list(_documents(text))


def _kubectl(stdin: str, *arguments: str) -> str:
    """Return the output of kubectl with this text as its input.

    Raises:
        RuntimeError: kubectl is missing, or fails.
    """
    argv = ["kubectl", *arguments]
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError("kubectl is not installed. It renders the manifests.") from None
    if done.returncode != 0:
        raise RuntimeError(f"kubectl cannot render it: {done.stderr.strip()}")
    return done.stdout


def _documents(text: str) -> Iterator[Resource]:
    """Yield the JSON documents of a text in which one follows the other."""
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        yield document
        text = text[end:]


def pod_of(resources: list[Resource]) -> Pod:
    """Return the pod of the only Deployment."""
    (deployment,) = [one for one in resources if one["kind"] == "Deployment"]
    files = {
        one["metadata"]["name"]: one["data"] for one in resources if one["kind"] == "ConfigMap"
    }
    return Pod(deployment["spec"]["template"]["spec"], files)


def podman_arguments(pod: Pod, folder: Path, ports: Mapping[int, int]) -> list[str]:
    """Return what follows ``podman run``: the options, with the command in one, and the image.

    Args:
        pod: what to run.
        folder: gets the files of its ConfigMaps.
        ports: the port on 127.0.0.1 for a port of the container; by default the same.
    """
    container = pod.container
    options = [*_security_options(pod), *_variable_options(container)]
    for port in container["ports"]:
        inside = port["containerPort"]
        options.append(f"--publish=127.0.0.1:{ports.get(inside, inside)}:{inside}")
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    # A mount below another one comes after it, as the kubelet has them.
    for mount in sorted(container["volumeMounts"], key=lambda mount: mount["mountPath"]):
        options += _mount_options(mount, volumes[mount["name"]], pod, folder)
    command = [*container["command"], *container["args"]]
    return [*options, f"--entrypoint={json.dumps(command)}", container["image"]]


def _security_options(pod: Pod) -> list[str]:
    """Return podman's options for the user, the capabilities and the devices of a pod."""
    user = pod.spec["securityContext"]
    rights = pod.container["securityContext"]
    options = [f"--user={user['runAsUser']}:{user['runAsGroup']}"]
    options += [f"--cap-drop={name}" for name in rights["capabilities"]["drop"]]
    if rights["readOnlyRootFilesystem"]:
        # Not podman's own folders in memory, which a pod does not have.
        options += ["--read-only", "--read-only-tmpfs=false"]
    if not rights["allowPrivilegeEscalation"]:
        options.append("--security-opt=no-new-privileges")
    for device in pod.container["resources"]["limits"]:
        if device == "nvidia.com/gpu":
            options.append("--device=nvidia.com/gpu=all")
    return options


def _variable_options(container: Resource) -> list[str]:
    """Return podman's options for the container's environment variables.

    A variable from a Secret has its value in this shell's variable of the same name. If that is not
    set, an optional one is left out.
    """
    options = []
    for variable in container["env"]:
        name = variable["name"]
        if "value" in variable:
            options.append(f"--env={name}={variable['value']}")
        elif name in os.environ or not variable["valueFrom"]["secretKeyRef"].get("optional"):
            # Without a value, podman takes it from its own environment. So the value is not on a
            # command line that other users can read.
            options.append(f"--env={name}")
    return options


def _mount_options(mount: Resource, volume: Resource, pod: Pod, folder: Path) -> list[str]:
    """Return podman's options for one mount of the container.

    Args:
        mount: the container's entry in ``volumeMounts``.
        volume: the volume of that name: an image, a claim, a ConfigMap, or an ``emptyDir``.
        pod: has the files of the ConfigMaps.
        folder: a ConfigMap is written here, to be mounted.
    """
    where = mount["mountPath"]
    if "image" in volume:
        return [f"--mount=type=image,source={volume['image']['reference']},destination={where}"]
    if "persistentVolumeClaim" in volume:
        return [f"--volume={volume['persistentVolumeClaim']['claimName']}:{where}:ro"]
    if "configMap" in volume:
        source = _write(pod.files[volume["configMap"]["name"]], folder / volume["name"])
        return [f"--volume={source / mount.get('subPath', '')}:{where}:ro"]
    # Kubernetes writes 2Gi, and podman 2g.
    size = volume["emptyDir"].get("sizeLimit", "").removesuffix("i").lower()
    if where == "/dev/shm":  # noqa: S108 - a path in the container
        return [f"--shm-size={size}"]
    limit = f",size={size}" if size else ""
    # With exec, because programs may be unpacked there.
    return [f"--tmpfs={where}:rw,exec,mode=1777{limit}"]


def _write(files: Mapping[str, str], folder: Path) -> Path:
    """Write files that the container's user can read into a new folder; return the folder."""
    folder.mkdir(mode=0o755)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o644)
    return folder


def main(arguments: list[str]) -> int:
    """Run the pod of the folder that is the only argument, until it ends.

    Return podman's exit code, 1 if the folder cannot be rendered, or 2 after wrong usage.
    """
    if len(arguments) != 1:
        print("usage: python3 tools/run_pod.py FOLDER", file=sys.stderr)
        return 2
    try:
        pod = pod_of(render(Path(arguments[0])))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="vllm_env_pod_") as folder:
        # The container's user is another one, and must be able to read the ConfigMaps in it.
        Path(folder).chmod(0o755)
        argv = ["podman", "run", "--rm", *podman_arguments(pod, Path(folder), {})]
        with subprocess.Popen(argv) as container:
            # Ctrl-C reaches podman, too, which passes it on. The server then takes seconds to end,
            # and this process must wait for it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return container.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
