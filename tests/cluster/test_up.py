"""`pdserve up` as a user runs it, with the demo model: what it says, what answers, how soon Ctrl-C
ends it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from support.lines import json_lines
from support.ports import free_port

from pdserve.cluster.operate.ray_settings import has_haproxy

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


ISOLATED = {"RAY_AUTH_MODE": "disabled"}
STOP_S = 60.0
STOPPING = "pdserve: stopping; unfinished answers have {} s left (router.drain_s)\n"


def _heed_ctrl_c() -> None:
    """A shell starts what runs in its background with Ctrl-C ignored, and children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def up(
    *arguments: str, env: Mapping[str, str] = ISOLATED
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process once it is ready, and what it has said."""
    command = [sys.executable, "-m", "pdserve.cluster.cli", "up", *arguments, "--timeout", "120"]
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment = inherited | {"PYTHONPATH": str(ROOT)} | dict(env)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        preexec_fn=_heed_ctrl_c,
    ) as process:
        said = ""
        assert process.stdout is not None
        try:
            while "Ctrl-C stops it" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            yield process, said
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=STOP_S)


def seconds_to_stop(process: subprocess.Popen[str]) -> float:
    """By Ctrl-C, which must end it and all that it started: they have its output open."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=STOP_S)
    assert process.returncode == 0
    return time.monotonic() - began


@pytest.mark.skipif(not has_haproxy(), reason="no haproxy")
def test_behind_haproxy_it_stops_soon() -> None:
    port = str(free_port())
    with up("cluster.yaml", "--haproxy", "--port", port) as (process, said):
        assert f"http://127.0.0.1:{port}/v1" in said
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            assert answer.status == 200
        assert seconds_to_stop(process) < 15


def test_options_of_serves_server_are_named_and_work(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["http_options"] |= {"request_timeout_s": 30, "port": free_port()}
    document["applications"][0]["route_prefix"] = "/llm"
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    with up(str(path)) as (process, said):
        assert "does not know http_options.request_timeout_s, route_prefix /llm." in said
        url = f"http://127.0.0.1:{document['http_options']['port']}/llm"
        assert f"curl -N {url}/v1/completions" in said
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            assert answer.status == 200
        assert seconds_to_stop(process) < 15


def test_a_model_without_a_file_is_served() -> None:
    port = str(free_port())
    words = ["--model", "demo/pdserve-demo", "--prefill", "1", "--decode", "1", "--name", "mine"]
    words += ["--name", "org/mine"]
    with up(*words, "--set", "engine.device=cpu", "--port", port) as (process, said):
        url = f"http://127.0.0.1:{port}"
        assert f"curl -N {url}/v1/completions" in said and '"model": "mine"' in said
        deadline = time.monotonic() + 30
        while status_of(f"{url}/ready") != 200:
            assert time.monotonic() < deadline, "P and D are not connected"
            time.sleep(0.1)
        for name in ("mine", "org/mine"):
            body = json.dumps({"model": name, "prompt": "Once upon", "max_tokens": 4}).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = json.load(answer)
                assert said["model"] == name and said["usage"]["completion_tokens"] == 4
        started = psutil.Process(process.pid).children(recursive=True)
        engines = [each for each in started if "EngineActor" in " ".join(each.cmdline())]
        assert [engine.nice() for engine in engines] == [psutil.Process().nice()] * 2
        for engine in engines:
            engine.kill()
        assert status_of(f"{url}/live") == 200
        while status_of(f"{url}/ready") == 200:
            assert time.monotonic() < deadline + 30, "both engines are dead"
            time.sleep(0.05)
        assert seconds_to_stop(process) < 15


async def streamed(client: httpx.AsyncClient, url: str, number: int) -> str:
    """The reason for which an answer of 300 tokens ended, if its stream came to its end."""
    body = {"prompt": f"Once upon {number}", "max_tokens": 300, "ignore_eos": True, "stream": True}
    reason = ""
    async with client.stream(
        "POST", f"{url}/v1/completions", json=body | {"model": "pdserve-demo"}
    ) as answer:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return reason
            if line.startswith("data: "):
                reason = json.loads(line[6:])["choices"][0]["finish_reason"] or reason
    return "cut off"


async def strike(process: subprocess.Popen[str], port: int) -> list[str]:
    """How 32 streams end that a signal comes into."""
    async with httpx.AsyncClient(timeout=60) as client:
        url = f"http://127.0.0.1:{port}"
        tasks = [asyncio.create_task(streamed(client, url, n)) for n in range(32)]
        await asyncio.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert not any(task.done() for task in tasks)
        return await asyncio.gather(*tasks)


def test_a_signal_lets_answers_come_to_their_end(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with up("cluster.yaml", "--port", str(port)) as (process, _):
        assert asyncio.run(strike(process, port)) == ["length"] * 32
        said, _ = process.communicate(timeout=STOP_S)
        assert process.returncode == 0 and said == STOPPING.format(60)
    assert "failed" not in capfd.readouterr().err


def test_what_goes_on_after_drain_s_ends_with_an_error() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": "pdserve-demo", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True}
    with up("cluster.yaml", "--port", str(port), "--set", "router.drain_s=1") as (process, _):
        with httpx.stream("POST", url, json=body | {"stream": True, "n": 4}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last, done = (line for line in lines if line)
        assert done == "data: [DONE]", (last, done)
        said = json.loads(last.removeprefix("data: "))["error"]["message"]
        assert said.startswith("the server stops: its worker was "), said
        printed, _ = process.communicate(timeout=STOP_S)
        assert process.returncode == 0 and printed == STOPPING.format(1)


def shared_memory() -> set[int]:
    """Returns the inodes of the files in /dev/shm."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            found.add(path.stat().st_ino)
    return found


def shared_by(processes: Iterable[psutil.Process]) -> set[int]:
    """Returns the inodes of the files in /dev/shm that these processes have mapped or opened.

    Those that no longer have a name count too. Files are told apart by inode: a semaphore is mapped
    under the name that it had before it got its own. Other programs, such as the tests that run at
    the same time, have files there too.
    """
    device = Path("/dev/shm").stat().st_dev
    found = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        with suppress(OSError):
            for line in (folder / "maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    found.add(int(line.split()[4]))
            for each in (folder / "fd").iterdir():
                with suppress(OSError):
                    opened = each.stat()
                    if opened.st_dev == device:
                        found.add(opened.st_ino)
    return found


@pytest.mark.processes
def test_a_semaphore_belongs_to_the_process_that_has_it() -> None:
    code = """
import multiprocessing
semaphore = multiprocessing.get_context("spawn").Semaphore()
print("sem." + semaphore._semlock.name.strip("/"), flush=True)
input()
"""
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        made = Path("/dev/shm", process.stdout.readline().strip()).stat().st_ino
        assert made in shared_by([psutil.Process(process.pid)]) & shared_memory()
        assert made not in shared_by([psutil.Process()])
        process.communicate("\n", timeout=60)
    assert made not in shared_memory()


def listeners(processes: list[psutil.Process]) -> set[int]:
    """Ports that they listen on."""
    pids = {each.pid for each in processes}
    found = psutil.net_connections("tcp")
    return {
        each.laddr.port for each in found if each.pid in pids and each.status == psutil.CONN_LISTEN
    }


def test_ten_signals_leave_nothing() -> None:
    """Each under 32 streams, all of which come to their end."""
    for _ in range(10):
        port = free_port()
        with (
            tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder,
            up(
                *("cluster.yaml", "--port", str(port)),
                env=ISOLATED | {"RAY_TMPDIR": folder, "TMPDIR": folder},
            ) as (process, _),
        ):
            started = psutil.Process(process.pid).children(recursive=True)
            ports = listeners(started)
            shared = shared_by(started)
            assert shared
            [raylet] = [each for each in started if each.name() == "raylet"]
            assert raylet.environ()["TMPDIR"] == folder, "so all have their files there"
            assert sum("EngineActor" in " ".join(each.cmdline()) for each in started) == 2
            assert port in ports and folder in Path("/proc/net/unix").read_text()
            assert asyncio.run(strike(process, port)) == ["length"] * 32
            said, _ = process.communicate(timeout=STOP_S)
            assert process.returncode == 0 and said == STOPPING.format(60)
            _, alive = psutil.wait_procs(started, timeout=5)
            assert not alive
            assert not list(Path(folder).glob("pdserve-*"))
            assert not shared & shared_memory()
            assert folder not in Path("/proc/net/unix").read_text()
            everybody = [psutil.Process(pid) for pid in psutil.pids()]
            assert not listeners(everybody) & ports


def until_linked(url: str) -> None:
    """Until a worker may pull from another: the first requests are served before that."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"{url}/admin/workers", timeout=10) as answer:
            workers = json.load(answer)["workers"]
        if any(worker["num_peers"] for worker in workers):
            return
        assert time.monotonic() < deadline, workers
        time.sleep(0.1)


def status_of(url: str, key: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=10
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def joins(address: str, env: Mapping[str, str]) -> bool:
    """Whether a driver may run code there."""
    script = (
        f"import ray; ray.init({address!r}); assert ray.get(ray.remote(lambda: 7).remote()) == 7"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=inherited | dict(env), capture_output=True, timeout=120
    )
    return done.returncode == 0


def test_api_keys_of_the_environment_and_rays_token_by_default(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["applications"][0]["args"]["router"] = {"api_key_env": "KEYS_OF_THE_TEST"}
    path = tmp_path / "cluster.yaml"
    port = str(free_port())
    path.write_text(yaml.safe_dump(document))
    # Ray's sockets want a short name
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        home = {"HOME": str(tmp_path), "RAY_TMPDIR": folder}
        with up(
            str(path), "--port", port, env=home | {"KEYS_OF_THE_TEST": "one-key,other-key"}
        ) as (process, said):
            assert "Bearer KEY" in said and "-key" not in said
            url = f"http://127.0.0.1:{port}"
            assert [
                status_of(f"{url}/v1/models", key) for key in (None, "x", "one-key", "other-key")
            ] == [
                *(401, 401),
                *(200, 200),
            ]
            assert status_of(f"{url}/health") == 200
            lines = [
                child.cmdline() for child in psutil.Process(process.pid).children(recursive=True)
            ]
            addresses = {
                part.partition("=")[2]
                for line in lines
                for part in line
                if part.startswith("--gcs-address=")
            }
            (address,) = addresses
            assert not joins(address, {"RAY_AUTH_MODE": "disabled"})
            assert not joins(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
            assert joins(address, home | {"RAY_AUTH_MODE": "token"})
            assert not any("one-key" in part for line in lines for part in line), (
                "a command line is for all to see"
            )
            seconds_to_stop(process)
        found = [
            file
            for file in Path(folder).rglob("*")
            if file.is_file() and b"one-key" in file.read_bytes()
        ]
        assert not found, "no log of Ray's has it"


@pytest.mark.parametrize("name", ["cpu-demo", "aggregated", "cpu-2p2d", "cpu-pool"])
def test_every_shipped_cluster_for_cpus_serves(name: str) -> None:
    port = str(free_port())
    body = (
        b'{"model": "pdserve-demo", "prompt": "Once upon a time", "max_tokens": 8, '
        b'"temperature": 0}'
    )
    with up(str(ROOT / f"pdserve/configs/{name}.yaml"), "--port", port) as (process, _):
        url = f"http://127.0.0.1:{port}/v1/completions"
        kind = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        assert seconds_to_stop(process) < 15


def test_a_file_that_this_machine_has_no_room_for_is_refused_at_once(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["applications"][0]["args"]["decode"] = {
        "replicas": 2,
        "num_gpus": 3,
        "labels": {"role": "decode"},
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    port = str(free_port())
    command = [sys.executable, "-m", "pdserve.cluster.cli", "up", str(path), "--port", port]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ISOLATED, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert (
        "decode: 2 replicas, each on one node with 3 GPU, the labels {role: decode}; there is room "
        "for 0" in done.stderr
    )
    assert "CPU free" in done.stderr and "Traceback" not in done.stderr


def exported(session: Path) -> set[str]:
    """Names of all series that Ray exports on its nodes."""
    targets = json.loads((session / "prom_metrics_service_discovery.json").read_text())[0][
        "targets"
    ]
    pages = []
    for target in targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            pages.append(answer.read().decode())
    return {
        line.split("{")[0].split(" ")[0]
        for page in pages
        for line in page.splitlines()
        if line[:1] != "#"
    }


def test_rays_grafana_finds_a_dashboard_of_what_ray_exports(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["applications"][0]["args"] |= {
        "logging": {"format": "json"},
        "slo": {"ttft_ms": 9000, "tpot_ms": 900},
    }
    document["applications"][0]["args"]["router"]["admin_http"] = True
    path = tmp_path / "cluster.yaml"
    port = str(free_port())
    path.write_text(yaml.safe_dump(document))
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder,
        up(str(path), "--port", port, env=ISOLATED | {"RAY_TMPDIR": folder}),
    ):
        until_linked(f"http://127.0.0.1:{port}")
        body = json.dumps(
            {"model": "pdserve-demo", "prompt": "Once upon a time", "max_tokens": 4}
        ).encode()
        headers = {"content-type": "application/json", "x-request-id": "seen"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers.get_all("x-request-id") == ["seen"]
        session = Path(folder, "ray", "session_latest").resolve()
        [placed] = session.glob("metrics/grafana/dashboards/pdserve*.json")
        panels = json.loads(placed.read_text())["panels"]
        asked = {
            name
            for panel in panels
            for target in panel.get("targets", ())
            for name in re.findall(r"ray_pdserve_\w+", target["expr"])
        }
        rare = "kv_pool|rejections|failovers|preemptions|unsettled|hits|cached_prompt|early"
        common = {name for name in asked if not re.search(rare, name)}
        deadline = time.monotonic() + 60
        while common - exported(session):
            assert time.monotonic() < deadline, f"Ray does not export {common - exported(session)}"
            time.sleep(2)
        told = [line for log in session.glob("logs/serve/*Router*.log") for line in json_lines(log)]
        [line] = [line for line in told if line.get("outcome")]
        assert line["request_id"].startswith("cmpl-seen-") and line["kv_source"] == "p2p"
        engines = [log.read_text() for log in session.glob("logs/worker-*.err")]
        ours = [
            json.loads(t)
            for text in engines
            for t in text.splitlines()
            if t.startswith('{"asctime"')
        ]
        assert {line["worker"].split("#")[0] for line in ours} == {"Prefill", "Decode"}, (
            "engines say what NIXL does"
        )


def test_keys_that_are_not_there_are_missed_at_once(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["applications"][0]["args"]["router"] = {"api_key_env": "KEYS_OF_THE_TEST"}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    port = str(free_port())
    command = [sys.executable, "-m", "pdserve.cluster.cli", "up", str(path), "--port", port]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ISOLATED, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "variable KEYS_OF_THE_TEST is not set" in done.stderr


WITH_FAKES = (
    "import sys, pdserve.cluster.app as app, pdserve.cluster.cli as cli; "
    "app.ENGINE_HOST = 'fake_engine_host:FakeEngineHost'; sys.exit(cli.main())"
)


def test_a_start_that_hangs_ends_with_its_stage(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["applications"][0]["args"]["model"]["name"] = "hangs-in-registration"
    document["applications"][0]["args"]["start"] = {"registration_s": 1}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-c", WITH_FAKES, "up", str(path), "--port", str(free_port())]
    fakes = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "WORKER_JOURNAL": str(tmp_path),
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | ISOLATED | fakes,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    stage = "registering KV memory with the transport: 1"
    steps = [
        line
        for line in done.stdout.splitlines()
        if stage in line and line.startswith("pdserve: Decode#")
    ]
    assert steps, done.stdout
    assert re.search(r"pdserve: Prefill#\w+: logs on \S+: /\S+, /\S+\.err", done.stdout)
    first_reason = done.stdout.index("StartError: worker")
    assert "Retrying 2 more time(s)" in done.stdout[:first_reason], "before Serve gave up"
    assert "deploying 'pdserve' failed" in done.stderr and "Traceback" not in done.stderr
    assert (
        f"made no progress for 1 s while {stage}" in done.stderr
        and "raise start.registration_s" in done.stderr
    )
