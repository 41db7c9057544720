"""`pdserve doctor` reports what this machine lacks, and what keeps a cluster.yaml from working.

If RAY_ADDRESS is set, the nodes of that cluster count, otherwise this machine. The checks of the
file are those of `pdserve up` (`cluster.operate.checks`). Ray is imported inside functions only
(see `cluster.operate.ray_settings` for the reason).
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pdserve.cluster.operate import checks
from pdserve.cluster.operate.checks import Finding, Place
from pdserve.cluster.operate.cluster_file import ClusterFile, load
from pdserve.cluster.operate.ray_settings import SETTINGS, has_haproxy
from pdserve.cluster.operate.sentences import told

HERE = Path("cluster.yaml")


def doctor(path: Path | None) -> int:
    """Prints one line per finding, and returns the exit status.

    It is 0 if nothing keeps a cluster from working, 1 if something does, and 2 if the file cannot
    be read or is not right. If `path` is None, cluster.yaml in this folder is checked, if there is
    one.
    """
    if path is None and HERE.exists():
        path = HERE
    file: ClusterFile | None = None
    complaint = None
    try:
        file = None if path is None else load(path)
    except (ValueError, OSError) as error:
        complaint = told(error)
    broken = 0
    for kind, text in [*machine(), *of_file(path, file)]:
        print(f"{kind:5} {text}")
        broken += kind == "error"
    if complaint is not None:
        print(f"error {complaint}")
        return 2
    return 1 if broken else 0


def of_file(path: Path | None, file: ClusterFile | None) -> Iterator[Finding]:
    if path is None:
        yield (
            "hint",
            f"this folder has no {HERE}, and no file was named: only this machine is checked",
        )
    if file is not None:
        yield "ok", f"{path} is valid: {file.config.mode}, model {file.config.model.resolved_path}"
        try:
            yield from checks.findings(file, None, _place())
        except (ValueError, OSError) as error:
            yield "error", told(error)


def machine() -> Iterator[Finding]:
    """Yields all findings about this machine."""
    yield _versions()
    yield from _environment()
    yield from _hardware()
    if importlib.util.find_spec("nixl") is None:
        yield (
            "error",
            "nixl cannot be imported, so decode workers recompute prompts: pip install nixl",
        )
    else:
        yield "ok", f"nixl {importlib.metadata.version('nixl')}"
    if has_haproxy():
        yield (
            "ok",
            "haproxy is installed: `pdserve up --haproxy` puts it in front of the routers of "
            "several nodes",
        )
    else:
        yield (
            "hint",
            "haproxy is not installed: routers of several nodes are reached through Serve's Python "
            "proxy, which costs 6 ms per request",
        )


def _place() -> Place:
    if "RAY_ADDRESS" not in os.environ:
        return checks.this_machine()
    checks.ray_answers(os.environ["RAY_ADDRESS"], "RAY_ADDRESS")
    os.environ.setdefault("RAY_AUTH_MODE", SETTINGS["RAY_AUTH_MODE"][0])  # as `up` does
    import ray

    from pdserve.cluster.placement.capacity import nodes

    ray.init(namespace="serve", log_to_driver=False)
    try:
        return Place(nodes(), is_here=False)
    finally:
        ray.shutdown()


def _versions() -> Finding:
    found = importlib.metadata.version("ray")
    if found != "2.60.0":
        return "error", f"ray {found}: pdserve uses parts of ray 2.60.0 that are not stable in Ray"
    return "ok", f"ray {found}, pdserve on Python {sys.version.split()[0]}"


def _environment() -> Iterator[Finding]:
    for name, (value, why) in SETTINGS.items():
        if name in os.environ:
            yield "ok", f"{name}={os.environ[name]}"
        else:
            yield (
                "hint",
                f"{name} is not set ({why}): `pdserve up` sets it to {value}; for `ray start` "
                "export it",
            )


def _hardware() -> Iterator[Finding]:
    shared = shutil.disk_usage("/dev/shm")
    if shared.free < 1 << 30:
        yield (
            "error",
            f"/dev/shm has only {shared.free >> 20} MiB free: Ray's object store and NIXL need "
            "about 1 GiB",
        )
    else:
        yield "ok", f"/dev/shm has {shared.free >> 30} GiB free"
    import torch

    if torch.cuda.is_available():
        yield (
            "ok",
            ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        )
    else:
        yield "hint", "no GPU is visible: engines run on CPU, which is only for trying things out"
