"""lm-eval's command on tasks of our own: generation over both endpoints, and likelihoods; with a
tokenizer of its own and with the server's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clients.asks import KEY, MODEL
from lm_eval.utils import RemoteTokenizer
from transformers import AutoTokenizer

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "demo" / "pdserve-demo"  # lm-eval counts tokens itself
NUM_DOCUMENTS = 12


def evaluate(
    folder: Path, kind: str, url: str, task: str, *options: str, **arguments: object
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Metrics of a task, and the samples. kind: lm-eval's name of the model. folder: for what it
    writes."""
    given = {"model": MODEL, "base_url": url, "max_retries": 1, **arguments}
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", kind, "--tasks", task),
        *("--model_args", ",".join(f"{name}={value}" for name, value in given.items())),
        *("--include_path", "lm_eval_tasks", "--output_path", str(folder), "--log_samples"),
        *options,
    ]
    environment = {**os.environ, "HF_HOME": str(folder / "cache"), "OPENAI_API_KEY": KEY}
    ran = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    [results] = folder.rglob("results_*.json")
    [samples] = folder.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == NUM_DOCUMENTS
    return json.loads(results.read_text())["results"][task], rows


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generation(url: str, tmp_path: Path, batch_size: int) -> None:
    """As token ids, one prompt a request or several."""
    found, _ = evaluate(
        tmp_path,
        "local-completions",
        f"{url}/v1/completions",
        "homes_generated",
        *("--batch_size", str(batch_size)),
        tokenizer=TOKENIZER,
        add_bos_token=True,
    )
    assert found["exact_match,none"] == 1.0


def test_generation_in_chats(url: str, tmp_path: Path) -> None:
    found, _ = evaluate(
        tmp_path,
        "local-chat-completions",
        f"{url}/v1/chat/completions",
        "homes_in_chat",
        "--apply_chat_template",
        num_concurrent=4,
    )
    assert found["exact_match,none"] == 1.0


@pytest.mark.parametrize("tokenized", [True, False])
def test_likelihoods_of_choices(url: str, tmp_path: Path, tokenized: bool) -> None:
    """The right town is the likeliest, and what the model would write; no other is."""
    found, rows = evaluate(
        tmp_path,
        "local-completions",
        f"{url}/v1/completions",
        "homes_chosen",
        tokenizer=TOKENIZER,
        tokenized_requests=tokenized,
        add_bos_token=tokenized,  # of a text the server makes tokens, and puts it there
        num_concurrent=4,
    )
    assert found["acc,none"] == 1.0
    for row in rows:
        greedy = [str(answer[0][1]) == "True" for answer in row["resps"]]
        assert greedy == [index == row["doc"]["gold"] for index in range(4)]


def test_likelihoods_of_texts(url: str, tmp_path: Path) -> None:
    """The facts are of the model's own kind: far likelier than bytes at random (8 bits)."""
    found, _ = evaluate(
        tmp_path,
        "local-completions",
        f"{url}/v1/completions",
        "homes_rolling",
        tokenizer=TOKENIZER,
        add_bos_token=True,
    )
    assert 0.1 < found["bits_per_byte,none"] < 2.0


LOCAL = {"tokenizer_backend": "huggingface", "tokenizer": TOKENIZER, "num_concurrent": 4}
# the model's name is no tokenizer that it could load
REMOTE = {"tokenizer_backend": "remote", "num_concurrent": 4}


@pytest.mark.parametrize(
    ("task", "metric", "options"),
    [
        ("homes_generated", "exact_match,none", {}),
        ("homes_chosen", "acc,none", {}),
        # prompts as text: it cuts token ids and has /detokenize make text of them
        ("homes_chosen", "acc,none", {"tokenized_requests": False}),
    ],
    ids=["generation", "choices", "choices as text"],
)
def test_the_servers_tokenizer(
    url: str, tmp_path: Path, task: str, metric: str, options: dict[str, object]
) -> None:
    """/tokenizer_info, /tokenize and /detokenize give the score of the local tokenizer, and the
    same answers."""
    endpoint = f"{url}/v1/completions"
    (score, answers), (expected, expected_answers) = (
        evaluate(tmp_path / name, "local-completions", endpoint, task, **given, **options)
        for name, given in (("remote", REMOTE), ("local", LOCAL))
    )
    assert score[metric] == expected[metric] == 1.0
    assert [row["resps"] for row in answers] == [row["resps"] for row in expected_answers]


def test_what_the_remote_tokenizer_knows(url: str) -> None:
    """lm-eval's class by itself: special tokens, chat template, text there and back."""
    local = AutoTokenizer.from_pretrained(TOKENIZER)
    remote = RemoteTokenizer(f"{url}/v1/completions")
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id"):
        assert getattr(remote, name) == getattr(local, name)
    text = "Tom lives in Lakeport. \U0001f3e0 Größe: 12 €\n\n<|eos|>"
    ids = local.encode(text, add_special_tokens=False)
    assert remote.encode(text) == ids
    assert remote.decode(ids) == text == local.decode(ids)
    assert remote.tokenizer_info["chat_template"] == local.chat_template
