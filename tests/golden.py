"""Does the working tree answer as an earlier commit does, bit for bit? For changes that must change
no behaviour.

    python tests/golden.py OLD                # OLD in a worktree of its own, against this tree
    python tests/golden.py OLD --only split   # one kind of cases
    python tests/golden.py FOLDER --device cuda  # engines on a GPU; FOLDER: OLD's tree, unpacked

Both sides run on the same machine. Each runs its own version of this file, so imported modules may
move. The cases compare tokens, texts and the bits of every log-probability. They cover engines
alone (siblings, chunks, preemption, prefix hits, asynchronous steps), P and D with a router, and
workers that die. They also cover what users write and read (errors, schemas, help, metrics' names).
A side's cases are a file of JSON lines, {"case", "digest", "shows"}; "shows" is printed if the
digests differ. Tests may move to other files, but no test of the old side may be missing.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "demo" / "pdserve-demo"

DEVICE = "PDSERVE_GOLDEN_DEVICE"  # where engines run; with --device both sides run this file

Json = Any
Case = tuple[str, Json]


# What is asked of an engine.

NUM_PROMPTS = 24
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"num_kv_blocks": 1024},
    "chunks": {"num_kv_blocks": 1024, "max_num_batched_tokens": 48},
    "tight": {"num_kv_blocks": 30, "block_size": 16},  # preempts
    "no cache": {"num_kv_blocks": 1024, "enable_prefix_caching": False},
    "ahead": {"num_kv_blocks": 1024, "async_scheduling": True},
}


def drawn_params(rng: random.Random, vocab_size: int) -> Json:
    """Parameters of one request: all that pdserve has, each in some."""

    def some(chance: float, **values: Any) -> Json:
        return values if rng.random() < chance else {}

    tokens = rng.sample(range(vocab_size), 8)
    return {
        "seed": rng.randrange(1 << 62),
        "max_tokens": rng.randrange(8, 40),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.6]),
        "n": rng.choice([1, 1, 1, 2, 4]),
        "logprobs": vocab_size - 1,  # all: their bits are those of the logits
        **some(0.3, top_k=rng.randrange(2, 50)),
        **some(0.3, top_p=rng.uniform(0.5, 0.99)),
        **some(0.2, min_p=rng.uniform(0.01, 0.2)),
        **some(0.3, repetition_penalty=rng.uniform(0.8, 1.5)),
        **some(0.3, presence_penalty=rng.uniform(-1, 1), frequency_penalty=rng.uniform(-1, 1)),
        **some(0.3, logit_bias={token: rng.uniform(-20, 5) for token in tokens}),
        **some(0.3, stop_token_ids=tokens),
        **some(0.3, prompt_logprobs=rng.randrange(4)),
        **some(0.5, ignore_eos=True),
        **some(0.2, min_tokens=5),
    }


def drawn_prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Some share prefixes of several blocks."""
    shared = [rng.randrange(5, vocab_size) for _ in range(70)]
    return [
        [
            *shared[: rng.choice([0, 0, 33, 70])],
            *(rng.randrange(5, vocab_size) for _ in range(rng.randrange(1, 90))),
        ]
        for _ in range(NUM_PROMPTS)
    ]


def engine_cases() -> Iterator[Case]:
    from support.tiny_models import FAMILIES, make_tiny

    from pdserve.models.families import FAMILIES as KNOWN

    with tempfile.TemporaryDirectory() as folder:
        known = {row.model_type for row in KNOWN.values()}  # an earlier tree knows fewer
        models = {
            family: make_tiny(family, Path(folder) / family)
            for family, (model_type, _) in FAMILIES.items()
            if model_type in known
        } | {"demo": DEMO}
        for name, path in models.items():
            for engine in ENGINES if name in ("llama3", "qwen3", "demo") else ("plain", "tight"):
                yield from _generated(f"engine {name} {engine}", path, ENGINES[engine])
        yield from _generated(
            "engine demo bfloat16", DEMO, ENGINES["plain"] | {"dtype": "bfloat16"}
        )


def _generated(case: str, path: Path, engine: Json) -> Iterator[Case]:
    """The same prompts twice: the second time their blocks are cached."""
    from pdserve.engine.llm import LLM, SamplingParams

    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    rng = random.Random(case.rpartition(" ")[0])  # all engines of a model get the same
    prompts = drawn_prompts(rng, vocab_size)
    params = [SamplingParams(**drawn_params(rng, vocab_size)) for _ in prompts]
    device = os.environ.get(DEVICE, "cpu")
    llm = LLM(str(path), tokenizer=path == DEMO, device=device, **engine)
    for turn in ("first", "again"):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        yield f"{case} {turn}", [_output(output) for output in outputs]
    if engine["num_kv_blocks"] < 100:
        assert llm.engine.scheduler.num_preemptions > 0, f"{case} preempts nobody"
    if path == DEMO:
        texts = [
            "Tom lives in Oakdale. Mira lives in Fernhill.\nQuestion: Where does Tom "
            "live?\nAnswer:",
            "23 + 54 =",
        ]
        stops = SamplingParams(
            max_tokens=24, temperature=0.8, seed=5, n=3, stop=["ak", " 7", "\n"], min_tokens=1
        )
        yield (
            f"{case} texts",
            [_output(output) for output in llm.generate(texts, stops, use_tqdm=False)],
        )
        messages = [{"role": "user", "content": "What is 23 + 54?"}]
        yield f"{case} chat", [_output(output) for output in llm.chat(messages, use_tqdm=False)]


def _output(output: Any) -> Json:
    choices = [
        [
            c.token_ids,
            c.text,
            c.finish_reason,
            c.stop_reason,
            [_bits(scores) for scores in c.logprobs or ()],
        ]
        for c in output.outputs
    ]
    return [
        choices,
        [scores and _bits(scores) for scores in output.prompt_logprobs or ()],
        output.num_cached_tokens,
    ]


def _bits(scores: Any) -> Json:
    return [
        scores.token_id,
        scores.logprob.hex(),
        scores.rank,
        [[token, value.hex()] for token, value in scores.top],
    ]


# What is asked of a cluster: separate processes, NIXL, HTTP.

PROMPT_CHARS = (160, 800)
# prompts of more than 128 tokens come in parts
WORKERS = {"num_kv_blocks": 2048, "max_num_batched_tokens": 128}


def cluster_cases() -> Iterator[Case]:
    cases: list[Case] = []
    asyncio.run(_clusters(cases))
    yield from cases


async def _clusters(cases: list[Case]) -> None:
    from support.hosts import hosts
    from support.served import cluster
    from support.streams import drafted, mid_stream, prompts
    from support.waiting import until_async

    from pdserve.configs.router import RouterConfig
    from pdserve.text.tokenizer import Tokenizer

    decode = Tokenizer.load(DEMO).decode
    config = RouterConfig(split="always", max_attempts=3, worker_silence_s=300.0)
    with hosts(DEMO, "P0", "D0", "D1", engine=WORKERS) as (p, first, second):
        async with cluster(p, first, config=config) as running:
            make = await drafted(running.client, prompts(PROMPT_CHARS), decode)
            asks = make()
            answers = await asyncio.gather(*(ask.run(running.client) for ask in asks))
            cases += [(f"split {i} {ask.name}", answers[i].decode()) for i, ask in enumerate(asks)]
        async with cluster(p, first, second, config=config) as running:
            asks = make()
            tasks = [asyncio.create_task(ask.run(running.client)) for ask in asks]
            await until_async(lambda: mid_stream(asks, 12))
            first.kill()
            answers = await asyncio.gather(*tasks)
            assert await running.metric("pdserve_router_failovers_total") > 0
            cases += [
                (f"failover {i} {ask.name}", answers[i].decode()) for i, ask in enumerate(asks)
            ]


# What users write and read.

HELP = (
    ["--help"],
    ["up", "--help"],
    ["doctor", "--help"],
    ["bench", "--help"],
    ["bench", "serve", "--help"],
)


def surface_cases() -> Iterator[Case]:
    from pdserve.cluster.operate.cluster_file import load
    from pdserve.configs.schema import ClusterConfig

    yield "surface configuration", ClusterConfig.model_json_schema()
    for path in [ROOT / "cluster.yaml", *sorted((ROOT / "pdserve" / "configs").glob("*.yaml"))]:
        yield f"surface {path.name}", _relative(repr(load(path)))
    for words in HELP:
        command = [sys.executable, "-m", "pdserve.cluster.cli", *words]
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"COLUMNS": "100"}
        )
        yield f"surface {' '.join(words)}", [ran.returncode, ran.stdout, ran.stderr]
    cases: list[Case] = []
    asyncio.run(_http(cases))
    yield from cases


async def _http(cases: list[Case]) -> None:
    """A router over workers on paper: errors, documents, names."""
    from router.harness import MODEL, Harness
    from support.bad_input import BAD
    from support.served import MODEL as THEIR_MODEL

    from pdserve.configs.router import RouterConfig
    from pdserve.text.tokenizer import Tokenizer

    harness = await Harness(Tokenizer.load(DEMO), RouterConfig(), 1, 1, 60.0).start()
    async with harness.http() as client:
        numbers: Counter[str] = Counter()  # of one name, that a new case renames no other
        for bad in BAD:
            body = bad.body.replace(THEIR_MODEL.encode(), MODEL.encode())
            answer = await client.request(bad.method, bad.path, content=body)
            numbers[bad.names] += 1
            case = f"surface bad {bad.names} {numbers[bad.names]}"
            cases.append((case, [answer.status_code, answer.text[:2000]]))
        for path in ("/openapi.json", "/v1/models", "/health"):
            answer = await client.get(path)
            text = re.sub(r'"created":\d+', '"created":0', answer.text)  # the clock's
            cases.append((f"surface {path}", [answer.status_code, text]))
        page = (await client.get("/metrics")).text
        cases.append(
            ("surface /metrics", [line for line in page.splitlines() if line.startswith("# ")])
        )
    await harness.fleet.close()


def _relative(text: str) -> str:
    return text.replace(str(ROOT), "")


# Both sides.

KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "surface": surface_cases,
    "engine": engine_cases,
    "split": cluster_cases,
}


def produce(out: Path, only: Sequence[str]) -> None:
    """Writes this side's cases to a file."""
    with out.open("w") as file:
        for kind, make in KINDS.items():
            if only and kind not in only:
                continue
            for case, value in tqdm(make(), desc=kind, unit="case"):
                text = json.dumps(value, sort_keys=True)
                digest = hashlib.sha256(text.encode()).hexdigest()
                file.write(
                    json.dumps({"case": case, "digest": digest, "shows": text[:20_000]}) + "\n"
                )


def run_side(root: Path, out: Path, only: Sequence[str]) -> dict[str, Json]:
    """Case -> its row, as the tree at `root` has it."""
    paths = [str(root), str(root / "tests")]
    runs = root
    if DEVICE in os.environ:
        runs = ROOT
        paths += filter(None, [os.environ.get("PYTHONPATH")])  # libraries that the machine lacks
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled"}
    command = [
        sys.executable,
        str(runs / "tests" / "golden.py"),
        "--produce",
        str(out),
        "--only",
        *only,
    ]
    subprocess.run(command, cwd=root, env=environment, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows, "no case"
    return {row["case"]: row for row in rows}


def collected_tests(root: Path) -> Counter[str]:
    """How often each test is there, by its name and parameters without its file. The import test
    has one per file of the package, so its parameters do not count."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
        "tests",
    ]
    environment = os.environ | {"PYTHONPATH": str(root), "RAY_AUTH_MODE": "disabled"}
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    names = [line.partition("::")[2] for line in ran.stdout.splitlines() if "::" in line]
    return Counter(
        "test_rooms_import_one_way" if "test_rooms_import_one_way" in name else name
        for name in names
    )


def lost_tests(old: Counter[str], new: Counter[str]) -> list[str]:
    """A line for each test of the old side that the new side lacks."""
    return [
        f"test {name}: {old[name]} before, {new[name]} now"
        for name in sorted(old)
        if new[name] < old[name]
    ]


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The commit's tree; a folder is one already."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        root = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(root), commit], cwd=ROOT, check=True
        )
        try:
            yield root
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(root)], cwd=ROOT, check=True
            )


def compare(old: dict[str, Json], new: dict[str, Json]) -> list[str]:
    """Returns the differences, one per line."""
    found = [f"{case}: only in the {side}" for side, case in _alone(old, new)]
    for case in old.keys() & new.keys():
        if old[case]["digest"] != new[case]["digest"]:
            before = old[case]["shows"]
            after = new[case]["shows"]
            at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
            start = max(0, at - 40)
            found.append(f"{case}: …{before[start : at + 80]!r} is now …{after[start : at + 80]!r}")
    return sorted(found)


def _alone(old: dict[str, Json], new: dict[str, Json]) -> list[tuple[str, str]]:
    return [("old side", case) for case in old.keys() - new.keys()] + [
        ("new side", case) for case in new.keys() - old.keys()
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compare what two commits answer, bit for bit")
    parser.add_argument("old", nargs="?", help="the commit that this tree is compared with")
    parser.add_argument(
        "--only", nargs="*", default=(), choices=[*KINDS, "tests"], help="kinds; default: all"
    )
    parser.add_argument("--produce", type=Path, help="only write this tree's cases to a file")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="run engines alone, there")
    options = parser.parse_args(words)
    if options.device is not None:
        os.environ[DEVICE] = options.device
        options.only = ["engine"]
    if options.produce is not None:
        produce(options.produce, options.only)
        return 0
    if options.old is None:
        parser.error("name the commit to compare with")
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder, worktree(options.old) as root:
        if not options.only or "tests" in options.only:
            before = collected_tests(root)
            after = collected_tests(ROOT)
            found += lost_tests(before, after)
            print(f"{before.total()} tests before, {after.total()} now")
        if not options.only or set(options.only) & KINDS.keys():
            old = run_side(root, Path(folder) / "old.jsonl", options.only)
            new = run_side(ROOT, Path(folder) / "new.jsonl", options.only)
            found += compare(old, new)
            print(f"{len(old.keys() & new.keys())} cases are on both sides")
    print(*found, f"{len(found)} differ" if found else "all are equal", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
