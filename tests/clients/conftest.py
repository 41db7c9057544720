"""The server of the tests, a session's fixture, and the record of a run.

    pytest -c tests/clients/pytest.ini tests/clients [--url=URL] [--results=FILE]

Runs in an environment of clients alone: no pdserve is imported here.
"""

import os

# before clients are imported: they ask other hosts for prices, news and vocabularies
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LITELLM_TELEMETRY="False",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    LANGSMITH_TRACING="false",
    AI_SDK_LOG_WARNINGS="false",
)

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.record import Record
from clients.server import serving


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", help="a server that runs already, instead of one of our own")
    parser.addoption("--results", type=Path, help="file to write what came out, as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--results"):
        config.pluginmanager.register(Record(path), "record")


@pytest.fixture(scope="session")
def url(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Root of the server's URL, without /v1 and without a slash at its end."""
    given = pytestconfig.getoption("--url")
    if given:
        yield given.rstrip("/")
        return
    with serving(tmp_path_factory.mktemp("server") / "up.log") as started:
        yield started


@pytest.fixture(scope="session")
def embedding_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As `url`, of a cluster that embeds: a model does that or generates. The demo model's decoder,
    whose embeddings mean little."""
    log = tmp_path_factory.mktemp("embedding") / "up.log"
    with serving(log, "cluster.yaml", "--set", "model.task=embed") as started:
        yield started


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine is run in a loop of its own; no plugin is needed for that."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
