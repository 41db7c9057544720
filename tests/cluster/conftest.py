"""One local Ray a session. Nothing of the fake engine is installed: worker processes find it on
PYTHONPATH.

A process can have one Ray at a time, and other tests start one of their own. So the tests that use
the session's Ray come after all others.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "local_ray" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where fake engines write what they receive."""
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="session")
def local_ray(journal: Path) -> Iterator[None]:
    # Ray's processes inherit these; Serve's token authentication would write into the home folder.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # Serve kills a proxy that is not ready in 5 s.
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "120"
    os.environ["WORKER_JOURNAL"] = str(journal)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    import ray
    from ray import serve

    ray.init(
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    yield
    serve.shutdown()
    ray.shutdown()
