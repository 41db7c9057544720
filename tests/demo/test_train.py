"""Training: rows, loss weights, schedule, and a few steps on CPU that really learn, save and
resume."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

import demo.train
from demo.data import ASSISTANT, BOS, CALL, CALL_END, END, EOS, THINK, THINK_END, USER
from demo.rows import ROW_LENGTHS, make_shard
from demo.tokenizer import token_id
from demo.train import (
    CHECKPOINT,
    RowStore,
    Trainer,
    TrainSettings,
    feeding,
    learning_rate,
    loss_weights,
    row_length_at,
    shard_tasks,
    weighted_loss,
)

CPU = torch.device("cpu")
SETTINGS = TrainSettings(seconds=60.0, tokens_per_step=512, num_recall_prompts=2, warmup_steps=4)


def store_with_rows(tokenizer: Tokenizer) -> RowStore:
    store = RowStore(CPU)
    store.add(make_shard(tokenizer, 0, 256, 4096))
    return store


def make_trainer(tokenizer: Tokenizer, out: Path) -> Trainer:
    return Trainer(SETTINGS, store_with_rows(tokenizer), tokenizer, out, time.monotonic())


@pytest.mark.parametrize("row_length", ROW_LENGTHS)
def test_rows_are_named_by_their_seed_and_mostly_full(
    tokenizer: Tokenizer, row_length: int
) -> None:
    shard = make_shard(tokenizer, 3, row_length, 40_000)
    assert shard.rows.shape == (40_000 // row_length, row_length + 1)
    assert np.array_equal(shard.rows, make_shard(tokenizer, 3, row_length, 40_000).rows)
    assert not np.array_equal(shard.rows, make_shard(tokenizer, 4, row_length, 40_000).rows)
    assert (shard.rows[:, 0] == token_id(tokenizer, BOS)).all()
    assert (shard.rows != token_id(tokenizer, EOS)).mean() > 0.85


def test_loss_weights_stress_answers_and_skip_padding(tokenizer: Tokenizer) -> None:
    text = f"It rained.\nAnswer: 42.{EOS}\nThe sky{END}{USER}Hi{END}{ASSISTANT}Oak{END}{EOS}{EOS}"
    encoded = tokenizer.encode(text)
    rows = torch.tensor([encoded.ids])
    weights = dict(
        zip(range(1, rows.shape[1]), loss_weights(tokenizer, rows)[0].tolist(), strict=True)
    )
    by_token = [(encoded.tokens[i], weights[i]) for i in range(1, rows.shape[1])]
    assert [token for token, weight in by_token if weight == 6] == [":", "Ġ", "4", "2", ".", EOS]
    assert [token for token, weight in by_token if weight == 2][-1] == END
    assert by_token[-1] == (EOS, 0)
    assert all(weight == 1 for token, weight in by_token if token in ("Ċ", "ĠThe", USER))


def weights_of(tokenizer: Tokenizer, text: str) -> list[tuple[str, float]]:
    """Returns each token after the first with its weight."""
    encoded = tokenizer.encode(text)
    weights = loss_weights(tokenizer, torch.tensor([encoded.ids]))[0].tolist()
    return list(zip(encoded.tokens[1:], weights, strict=True))


def test_json_of_replies_weighs_more(tokenizer: Tokenizer) -> None:
    call = f'{CALL}\n{{"name": "f"}}\n{CALL_END}'
    by_token = weights_of(tokenizer, f'{USER}{{"a": 1}}{END}{ASSISTANT}{call}{END}{USER}{{"b": 2}}')
    stressed = [token for token, weight in by_token if weight == 4]
    assert stressed[0] == "name" and stressed[-2:] == [CALL_END, END]
    assert (CALL, 2) in by_token and ("a", 1) in by_token and ("b", 1) in by_token


@pytest.mark.parametrize("words", ["Hi. Think first.", "Think first. Hi.", "Hi."])
def test_reasoning_that_nobody_asked_for_is_not_learned(tokenizer: Tokenizer, words: str) -> None:
    thought = f"{USER}{words}{END}{ASSISTANT}{THINK}\nI see.\n{THINK_END}\n\nHello!{END}"
    by_token = weights_of(tokenizer, f"{USER}Think about it.{END}{BOS}{thought}")
    assert (THINK, 2.0 if "Think" in words else 0.0) in by_token
    assert (THINK_END, 2.0) in by_token


def test_weighted_loss_is_the_weighted_mean() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 8)
    embedding = torch.randn(11, 8)
    targets = torch.randint(11, (2, 3))
    weights = torch.tensor([[1.0, 0.0, 6.0], [2.0, 0.0, 0.0]])
    log_probs = (hidden @ embedding.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(
        weighted_loss(hidden, embedding, targets, weights), -(log_probs * weights).sum() / 9
    )


def test_schedule() -> None:
    settings = TrainSettings(seconds=100.0)
    assert learning_rate(settings, 0, 0.0) == pytest.approx(settings.lr / settings.warmup_steps)
    assert learning_rate(settings, 10_000, 0.5) == settings.lr
    assert learning_rate(settings, 10_000, 0.8) == pytest.approx(settings.lr / 2)
    assert learning_rate(settings, 10_000, 1.1) == 0.0
    assert {row_length_at(0.1, draw / 10) for draw in range(10)} == {256}
    assert {row_length_at(0.9, draw / 10) for draw in range(10)} == set(ROW_LENGTHS)


def test_shard_tasks_of_two_sessions_share_no_seed() -> None:
    first, second = (list(shard_tasks(TrainSettings(seconds=1.0, seed=seed))) for seed in (0, 1))
    assert {seed for seed, _, _ in first}.isdisjoint(seed for seed, _, _ in second)
    assert {length for _, length, _ in first} == set(ROW_LENGTHS)


@pytest.mark.processes
def test_feeding_fills_the_store_from_a_worker() -> None:
    store = RowStore(CPU)
    with feeding(store, TrainSettings(seconds=1.0, shard_tokens=2048, num_shards=3), num_workers=1):
        assert store.sample(256, 4).shape == (4, 257)
    assert 0 < store.num_tokens <= 3 * 8 * 257


@pytest.fixture
def trained(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[tuple[Trainer, list[float]]]:
    trainer = make_trainer(tokenizer, tmp_path / "out")
    yield trainer, [trainer.step(256).item() for _ in range(12)]


@pytest.mark.lengthy
def test_steps_learn_and_the_saved_folder_loads(
    trained: tuple[Trainer, list[float]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    trainer, losses = trained
    assert losses[-1] < losses[0] - 0.3
    assert trainer.finish() == (0.0, 0.0)
    files = sorted(path.name for path in trainer.out.iterdir())
    assert len(files) == 8 and {"config.json", "model.safetensors", CHECKPOINT} <= set(files)
    assert json.loads((trainer.out / "training.json").read_text())["num_steps"] == 12
    stored = LlamaForCausalLM.from_pretrained(trainer.out)
    assert (
        stored.dtype == torch.bfloat16 and sum(p.numel() for p in stored.parameters()) < 3_000_000
    )
    weight = trainer.model.model.embed_tokens.weight
    torch.testing.assert_close(stored.lm_head.weight, weight.to(torch.bfloat16))
    assert AutoTokenizer.from_pretrained(trainer.out).encode("a") == tokenizer.encode("a").ids


@pytest.mark.lengthy
def test_a_second_session_continues_from_the_checkpoint(
    trained: tuple[Trainer, list[float]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    trainer, _ = trained
    trainer.save_checkpoint()
    second = make_trainer(tokenizer, tmp_path / "second")
    second.resume(trainer.out / CHECKPOINT)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert second.first_phase >= 0.35


@pytest.mark.lengthy
def test_run_ends_with_the_clock(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.train, "FINISH_SECONDS", 0.0)
    settings = TrainSettings(seconds=3.0, tokens_per_step=512)
    trainer = Trainer(settings, store_with_rows(tokenizer), tokenizer, tmp_path, time.monotonic())
    # Long rows come late in the schedule; here they are stored as well, or `sample` would wait for
    # them.
    for length in ROW_LENGTHS[1:]:
        trainer.store.add(make_shard(tokenizer, 1, length, length))
    trainer.started = time.monotonic()
    trainer.run()
    assert trainer.num_steps > 0 and 3.0 <= time.monotonic() - trainer.started < 100.0
