"""Trains the demo model within a wall-clock budget on one GPU and writes it in Hugging Face format.

Worker processes generate rows (demo/rows.py) while the GPU trains on finished ones. Rows get longer
over time, because copying from context is learned fastest on short ones. The schedule follows the
clock, not a number of steps. This module knows the row store and the model, but not how text is
made. It is run by hand: `python -m demo.train --minutes 9.2 --out DIR`.
"""

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo.data import ASSISTANT, BOS, END, EOS, THINK
from demo.evaluate import answers_match, load_model
from demo.recall import THRESHOLD, length_bucket, recall_prompts, shares
from demo.rows import ROW_LENGTHS, Shard, start_worker, worker_shard
from demo.skills import SKILLS, TOOLS_THRESHOLD, skill_prompts
from demo.tokenizer import MAX_LENGTH, MODEL_DIR, token_id

CHECKPOINT = "fp32.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FINISH_SECONDS = 25.0
VALIDATION_SEED = 101
FINAL_SEED = 202


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run."""

    seconds: float  # of the whole run, including its end
    seed: int = 0
    tokens_per_step: int = 1 << 17
    lr: float = 2e-3
    warmup_steps: int = 200
    decay: float = 0.4  # share of the time, at its end, in which lr falls linearly to 0
    weight_decay: float = 0.05
    shard_tokens: int = 1 << 20
    num_shards: int = 1500
    report_seconds: float = 45.0
    num_recall_prompts: int = 300


@dataclass
class RowStore:
    """Token rows on the training device, by row length. The feeding thread calls `add`, and
    training calls `sample`."""

    device: torch.device
    shards: dict[int, list[Tensor]] = field(
        default_factory=lambda: {length: [] for length in ROW_LENGTHS}
    )

    def add(self, shard: Shard) -> None:
        self.shards[shard.row_length].append(
            torch.from_numpy(shard.rows.astype("int16")).to(self.device)
        )

    def sample(self, row_length: int, num_rows: int) -> Tensor:
        """Returns int64 [num_rows, row_length + 1] from one random shard. Waits for the first shard
        of that length."""
        while not self.shards[row_length]:
            time.sleep(0.05)
        shard = random.choice(self.shards[row_length])
        return shard[torch.randint(len(shard), (num_rows,), device=self.device)].long()

    @property
    def num_tokens(self) -> int:
        return sum(shard.numel() for shards in self.shards.values() for shard in shards)


def shard_tasks(settings: TrainSettings) -> Iterator[tuple[int, int, int]]:
    """Yields (seed, row length, tokens) of every shard. Short rows come first, then the mix of the
    curriculum's last phase."""
    rng = random.Random(settings.seed)
    for i in range(settings.num_shards):
        length = ROW_LENGTHS[0] if i < 32 else row_length_at(1.0, rng.random())
        yield (settings.seed + 1) * 1_000_000 + i, length, settings.shard_tokens


def row_length_at(progress: float, draw: float) -> int:
    """Returns the row length for a uniform `draw` at this share of the training time. At first it
    is always 256, then also longer."""
    if progress < 0.2:
        return ROW_LENGTHS[0]
    if progress < 0.35:
        return ROW_LENGTHS[0] if draw < 0.4 else ROW_LENGTHS[1]
    return ROW_LENGTHS[0] if draw < 0.15 else ROW_LENGTHS[1] if draw < 0.4 else ROW_LENGTHS[2]


@contextmanager
def feeding(store: RowStore, settings: TrainSettings, num_workers: int) -> Iterator[None]:
    """Fills the store in the background with `num_workers` processes. It must be entered before
    CUDA is initialised, because they are forked."""
    context = multiprocessing.get_context("fork")
    pool = context.Pool(num_workers, start_worker, (MODEL_DIR / "tokenizer.json",))

    def feed() -> None:
        for shard in pool.imap_unordered(worker_shard, shard_tasks(settings)):
            if stop.is_set():
                return
            store.add(shard)

    stop = threading.Event()
    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=10)
        pool.terminate()
        pool.join()


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Returns the config of a model with 2.82 M parameters, tied embeddings, and 8 query heads on 4
    KV heads."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, EOS),
        pad_token_id=None,
    )


def loss_weights(tokenizer: Tokenizer, rows: Tensor) -> Tensor:
    """Returns weights [num_rows, length - 1] of rows[:, 1:].

    They are 6 in recall answers, 4 in JSON of replies, 2 in other replies, and else 1. They are 0
    in padding and for a <think> that no words asked for, because the chat template writes that.
    """
    texts = ("Answer", ASSISTANT, EOS, END, BOS, THINK, '{"', "Think", "\u0120Think")
    ids = {text: token_id(tokenizer, text) for text in texts}
    inputs = rows[:, :-1]
    targets = rows[:, 1:]
    position = torch.arange(inputs.shape[1], device=rows.device).expand_as(inputs)

    def last(mask: Tensor) -> Tensor:
        return torch.where(mask, position, -1).cummax(dim=1).values

    ended = last(inputs.eq(ids[EOS]) | inputs.eq(ids[END]))
    in_answer = last(inputs.eq(ids["Answer"])) > ended
    in_reply = last(inputs.eq(ids[ASSISTANT])) > ended
    in_json = in_reply & (last(inputs.eq(ids['{"'])) > ended)
    is_asked = last(inputs.eq(ids["Think"]) | inputs.eq(ids["\u0120Think"])) > last(
        inputs.eq(ids[BOS])
    )
    weights = 1.0 + 5.0 * in_answer + 1.0 * in_reply + 2.0 * in_json
    is_padding = inputs.eq(ids[EOS]) & targets.eq(ids[EOS])
    return weights * ~is_padding * ~(targets.eq(ids[THINK]) & ~is_asked)


def weighted_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean cross entropy of hidden [rows, length, hidden] with the tied output
    embedding [vocab, hidden]."""
    logits = nn.functional.linear(hidden, embedding).float()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def make_optimizer(model: nn.Module, settings: TrainSettings, fused: bool) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(settings: TrainSettings, step: int, progress: float) -> float:
    """Returns the learning rate: warm-up by steps, then constant, then linearly to 0 over the last
    `decay` of the time."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.lr * warm * max(0.0, min(1.0, (1.0 - progress) / settings.decay))


class Trainer:
    """The model in training, and a plain copy for measuring. The odd shapes of measuring would make
    the compiled model recompile."""

    def __init__(
        self,
        settings: TrainSettings,
        store: RowStore,
        tokenizer: Tokenizer,
        out: Path,
        started: float,
    ) -> None:
        self.settings = settings
        self.store = store
        self.tokenizer = tokenizer
        self.out = out
        self.started = started
        self.on_cuda = store.device.type == "cuda"
        torch.manual_seed(settings.seed)
        self.model = LlamaForCausalLM(model_config(tokenizer)).to(store.device)  # type: ignore[arg-type]
        self.plain = LlamaForCausalLM(model_config(tokenizer)).to(store.device).eval()  # type: ignore[arg-type]
        self.loss = weighted_loss
        if self.on_cuda:
            torch._dynamo.config.recompile_limit = 64
            # Layers are compiled one by one. If the model were traced as a whole, transformers
            # would build an explicit mask and lose flash attention.
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(weighted_loss, dynamic=False)
        self.optimizer = make_optimizer(self.model, settings, fused=self.on_cuda)
        self.first_phase = 0.0
        self.num_steps = self.num_tokens = 0

    def resume(self, checkpoint: Path) -> None:
        """Continues from fp32 weights, in the curriculum's last phase. The optimizer starts
        anew."""
        self.model.load_state_dict(load_file(checkpoint), strict=False)
        self.model.tie_weights()
        self.first_phase = 0.35

    @property
    def progress(self) -> float:
        """The share of the training time that has passed."""
        return (time.monotonic() - self.started) / max(1.0, self.settings.seconds - FINISH_SECONDS)

    def step(self, row_length: int) -> Tensor:
        """Does one optimizer step on rows of this length. Returns the loss, still on the device."""
        rows = self.store.sample(row_length, max(1, self.settings.tokens_per_step // row_length))
        weights = loss_weights(self.tokenizer, rows)
        with torch.autocast(self.store.device.type, dtype=torch.bfloat16, enabled=self.on_cuda):
            hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            loss = self.loss(hidden, self.model.model.embed_tokens.weight, rows[:, 1:], weights)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.num_steps, self.progress)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        self.num_tokens += rows[:, 1:].numel()
        return loss.detach()

    def run(self) -> None:
        """Trains until the time is over, with a report every `report_seconds`."""
        rng = random.Random(self.settings.seed)
        next_report = time.monotonic() + 10.0
        while self.progress < 1.0:
            loss = self.step(row_length_at(max(self.first_phase, self.progress), rng.random()))
            if time.monotonic() > next_report:
                self.report(loss.item())
                next_report = time.monotonic() + self.settings.report_seconds

    def report(self, loss: float) -> None:
        """Prints loss, speed, recall and skills on validation prompts, and saves a checkpoint."""
        self.save_checkpoint()
        self.plain.load_state_dict(self.model.state_dict())
        num_skills = max(1, self.settings.num_recall_prompts // 3)
        skills = self.skills(self.plain, VALIDATION_SEED, num_skills)
        prompts = recall_prompts(VALIDATION_SEED, self.settings.num_recall_prompts)
        matches = answers_match(self.plain, self.tokenizer, prompts)
        print(
            f"{time.monotonic() - self.started:5.0f} s  step {self.num_steps}  "
            f"{self.num_tokens / 1e6:.0f} M tokens "
            f"(generated {self.store.num_tokens / 1e6:.0f} M)  loss {loss:.4f}  "
            f"recall {sum(matches) / len(matches):.4f}  "
            f"{shares([p.kind for p in prompts], matches)}  {skills}",
            flush=True,
        )

    def skills(self, model: LlamaForCausalLM, seed: int, num_prompts: int) -> dict[str, float]:
        """Returns the share of exactly right replies to `num_prompts` prompts of each skill."""
        found: dict[str, float] = {}
        for skill in SKILLS:
            prompts = skill_prompts(skill, seed, num_prompts)
            matches = answers_match(model, self.tokenizer, prompts, END)
            found[skill] = round(sum(matches) / len(matches), 4)
        return found

    def save_checkpoint(self) -> None:
        """Saves the float32 weights for `resume`, without the tied output embedding."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            k: v.cpu().contiguous()
            for k, v in self.model.state_dict().items()
            if k != "lm_head.weight"
        }
        save_file(state, self.out / CHECKPOINT)

    def save_model(self) -> None:
        """Saves the Hugging Face folder: weights as bfloat16, generation defaults, tokenizer."""
        self.save_checkpoint()
        self.plain.load_state_dict(self.model.state_dict())
        ends = [token_id(self.tokenizer, text) for text in (EOS, END)]
        self.plain.generation_config = GenerationConfig(
            bos_token_id=token_id(self.tokenizer, BOS), eos_token_id=ends, pad_token_id=ends[0]
        )
        self.plain.to(torch.bfloat16).save_pretrained(self.out)
        for name in TOKENIZER_FILES:
            shutil.copy(MODEL_DIR / name, self.out / name)

    def finish(self) -> tuple[float, float]:
        """Saves the model. Returns the recall of the saved model and its share of right calls of
        tools, on prompts that no report has used."""
        self.save_model()
        stored = load_model(self.out, self.store.device.type)
        prompts = recall_prompts(FINAL_SEED, self.settings.num_recall_prompts)
        matches = answers_match(stored, self.tokenizer, prompts)
        lengths = [length_bucket(len(self.tokenizer.encode(p.prompt).ids)) for p in prompts]
        accuracy = sum(matches) / len(matches)
        skills = self.skills(stored, FINAL_SEED, self.settings.num_recall_prompts)
        figures = {
            "settings": asdict(self.settings),
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_parameters": sum(p.numel() for p in stored.parameters()),
            "device": torch.cuda.get_device_name() if self.on_cuda else "cpu",
            "recall": accuracy,
            "recall_by_tokens": shares(lengths, matches),
            "skills": skills,
        }
        (self.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
        print(json.dumps(figures, indent=2), flush=True)
        return accuracy, skills["tools"]


def main() -> int:
    parser = argparse.ArgumentParser(description="train the demo model")
    parser.add_argument("--minutes", type=float, default=9.2, help="wall-clock time of the run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help=f"folder with {CHECKPOINT} to continue from")
    parser.add_argument(
        "--seed", type=int, default=0, help="use another one with --resume, to get new rows"
    )
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 2))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    started = time.monotonic()
    settings = TrainSettings(seconds=args.minutes * 60, seed=args.seed)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    store = RowStore(torch.device(args.device))
    torch.set_float32_matmul_precision("highest")
    with feeding(store, settings, args.workers):
        trainer = Trainer(settings, store, tokenizer, args.out, started)
        if args.resume:
            trainer.resume(args.resume / CHECKPOINT)
        trainer.run()
    recall, tools = trainer.finish()
    return 0 if recall >= THRESHOLD and tools >= TOOLS_THRESHOLD else 1


if __name__ == "__main__":
    sys.exit(main())
