"""The rooms import one way only (docs/design/architecture.md), and what serves HTTP stays free of
torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdserve

ROOT = Path(pdserve.__file__).parent

# room -> rooms it may import; everyone may import configs
ALLOWED: dict[str, set[str]] = {
    "configs": set(),
    "protocol": set(),
    "background": set(),
    "text": set(),
    "turns": {"protocol", "text"},
    "kernels": set(),
    "parallel": {"background", "kernels"},
    "models": {"kernels", "parallel"},
    "engine": {"protocol", "background", "models", "kernels", "parallel", "text", "turns"},
    "kvtransfer": {"protocol", "background", "engine", "kernels"},
    "prefill": {"protocol", "engine", "kvtransfer"},
    "decode": {"protocol", "engine", "kvtransfer"},
    "worker": {"protocol", "background", "engine", "kvtransfer", "parallel", "prefill", "decode"},
    "router": {"protocol", "background", "text", "turns"},
    "bench": {"engine"},
    "chat": {"text", "bench"},
    "plan": {
        "protocol",
        "router",
        "worker",
        "engine",
        "kvtransfer",
        "text",
        "models",
        "kernels",
        "parallel",
        "bench",
    },
    "calibration": {"engine", "models", "kernels", "text", "bench"},
    "cluster": {
        "protocol",
        "background",
        "router",
        "worker",
        "text",
        "turns",
        "kernels",
        "models",
        "parallel",
        "bench",
        "chat",
        "plan",
        "calibration",
    },
}
# a room that may import only some files of another
ONLY: dict[tuple[str, str], set[str]] = {
    ("kvtransfer", "engine"): {
        "pdserve.engine.memory.device_memory",
        "pdserve.engine.memory.kv_cache",
    },
    ("kvtransfer", "kernels"): {"pdserve.kernels.ops"},
    ("cluster", "models"): {
        "pdserve.models.checkpoint",
        "pdserve.models.config",
        "pdserve.models.generation_defaults",
        "pdserve.models.task",
    },
    ("cluster", "kernels"): {"pdserve.kernels.experts.load_file"},
    ("cluster", "parallel"): {"pdserve.parallel.dims"},
    ("bench", "engine"): {"pdserve.engine.llm"},
    ("plan", "kernels"): {"pdserve.kernels.experts.products.tiles"},
    ("plan", "parallel"): {"pdserve.parallel.dims", "pdserve.parallel.hang_up"},
    ("chat", "text"): {"pdserve.text.answers.pieces"},
    ("chat", "bench"): {"pdserve.bench.option_values"},
    ("cluster", "calibration"): {"pdserve.calibration.cli"},
    ("calibration", "bench"): {"pdserve.bench.option_values"},
    ("cluster", "chat"): {"pdserve.chat.cli"},
    ("cluster", "plan"): {"pdserve.plan.cli"},
    ("cluster", "bench"): {"pdserve.bench.cli", "pdserve.bench.option_values"},
}
# rooms inside a room, and files beside them, from the lowest to the highest; what stands in one
# line does not import each other
ORDER: dict[str, list[str]] = {
    "kernels": [
        "e4m3",
        "launching",
        "batch norm sampling",
        "collective kv",
        "linear",
        "attention experts",
        "latents",
        "ops",
    ],
    "text": [
        "answers chat_messages pieces stop",
        "chat_template grammars",
        "tokenizer",
        "detokenize long_texts",
        "choice",
        "answer_text",
    ],
    "turns": ["tool_checks", "turn", "enforcement", "model_turns"],
    "engine": [
        "grammars graph_sizes",
        "memory pacing sampling step_result",
        "scheduling",
        "requests",
        "stepping reservations",
        "execution",
        "expert_places rank_links",
        "components",
        "engine",
        "warm_up",
        "build",
        "ranks",
        "llm_prompts llm_run",
        "llm",
    ],
    "kvtransfer": ["connector transport", "remote", "p2p pool", "build"],
    "router": [
        "errors held_bytes permits times",
        "fleet",
        "choosing metrics",
        "admin admission expert_load grammars metrics_page probes",
        "request",
        "turns",
        "http",
    ],
    "bench": ["option_values record sse_client tables workload", "load offline", "replay", "cli"],
    "chat": ["conversation screen server", "session", "cli"],
    "plan": ["costs", "profile", "simulation", "loads", "layouts", "search", "report", "cli"],
    "cluster": [
        "access links loop_thread names",
        "orders",
        "client placement",
        "scaling",
        "deployments",
        "app",
        "operate",
        "cli",
    ],
}
OUTSIDE: dict[str, set[str]] = {
    "ray": {"cluster"},
    "nixl": {"kvtransfer"},
    "lmcache": {"kvtransfer"},
    "opentelemetry": {"router"},
}


def files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def name_of(path: Path) -> str:
    return ".".join(("pdserve", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def modules_of(path: Path) -> set[str]:
    """Our modules that a file imports; `from pdserve.a import b` is pdserve.a.b where b is a
    module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pdserve."):
            folder = ROOT.joinpath(*(node.module or "").split(".")[1:])
            if folder.is_dir():
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_import_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imports_of(path):
        top, *rest = name.split(".")
        assert room in OUTSIDE.get(top, {room}), f"{room} must not import {top}"
        if top != "pdserve" or not rest or rest[0] in (room, "configs"):
            continue
        assert rest[0] in ALLOWED[room], f"{room} must not import {name}"
        only = ONLY.get((room, rest[0]))
        assert only is None or name in only, f"{room} may import {only} of {rest[0]}, not {name}"


@pytest.mark.parametrize("room", ORDER)
def test_rooms_inside_a_room_import_one_way(room: str) -> None:
    floor = {name: number for number, names in enumerate(ORDER[room]) for name in names.split()}
    for path in files():
        here, name, *_ = (*path.relative_to(ROOT).with_suffix("").parts, "")
        if here != room or name == "__init__":
            continue
        assert name in floor, f"{room}/{name} stands nowhere in ORDER"
        for module in modules_of(path):
            top, other, *_ = (*module.split(".")[1:], "", "")
            if top == room and other not in ("", name):
                assert floor[other] < floor[name], (
                    f"{path.relative_to(ROOT)} must not import {module}"
                )


def test_no_file_imports_in_a_circle() -> None:
    known = {name_of(path): path for path in files()}
    left = {
        name: {module for module in modules_of(path) if module in known}
        for name, path in known.items()
    }
    while ready := [name for name, imports in left.items() if not imports & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, f"these import each other, or something that does: {sorted(left)}"


def test_the_page_says_the_same() -> None:
    """The table of docs/design/architecture.md; a star marks a room of which only some files may be
    imported."""
    page = (ROOT.parent / "docs" / "design" / "architecture.md").read_text()
    section = page[page.index("### Who may import whom?") :].partition("\n## ")[0]
    said: dict[str, set[str]] = {}
    for rooms, imports in re.findall(r"^\| (`.+?`) \| (.+) \|$", section, re.M):
        for room in re.findall(r"`(\w+)`", rooms):
            said[room] = set(re.findall(r"`\w+`(?: \\\*)?", imports))
    assert said == {
        room: {f"`{name}` \\*" if (room, name) in ONLY else f"`{name}`" for name in imports}
        for room, imports in ALLOWED.items()
    }


def test_every_room_is_listed() -> None:
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir() and list(p.rglob("*.py"))}
    assert rooms == set(ALLOWED)


def test_every_room_has_a_page_top() -> None:
    folders = {path.parent for path in files()}
    tops = {folder: folder / "__init__.py" for folder in folders}
    missing = [str(folder.relative_to(ROOT)) for folder, top in tops.items() if not top.is_file()]
    assert not missing, "rooms without an __init__.py that says what they do"
    for folder, top in tops.items():
        page = ast.get_docstring(ast.parse(top.read_text())) or ""
        assert len(page) > 80, f"{folder.relative_to(ROOT)}/__init__.py says little"


def modules(*rooms: str) -> list[str]:
    return [name_of(path) for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.processes
def test_router_and_shell_need_no_torch() -> None:
    names = modules("router", "text", "turns", "configs", "protocol", "background")
    names += ["pdserve.worker.engine_client", "pdserve.bench.cli", "pdserve.bench.load"]
    names += [
        "pdserve.cluster.deployments.worker_replica",
        "pdserve.cluster.deployments.router_replica",
        "pdserve.cluster.client",
    ]
    code = (
        f"import sys\nfor n in {names}: __import__(n)\nassert 'torch' not in sys.modules, 'torch "
        "was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_one_file_knows_opentelemetry() -> None:
    """Whoever exports no traces needs no such library."""
    users = [
        path for path in files() if "opentelemetry" in {n.split(".")[0] for n in imports_of(path)}
    ]
    assert [name_of(path) for path in users] == ["pdserve.router.request.traces.otlp"]


@pytest.mark.processes
def test_the_command_line_starts_without_what_a_single_command_needs() -> None:
    code = (
        "import sys\nimport pdserve.cluster.cli\n"
        "found = {'httpx', 'httpx_sse', 'readline', 'torch', 'ray'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
