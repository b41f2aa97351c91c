"""Train the demonstration model on one CPU core.

    python -m demo.recipe.train

One thread, a fixed seed and a fixed ``--steps`` make a run reproducible on one machine. The
learning rate decays towards the last step, so ``--steps`` cannot be changed half way. A run that
was interrupted goes on from its last checkpoint when started again with the same arguments.

Load balance follows DeepSeek-V3 (technical report, section 2.1.2), without an auxiliary loss: after
each step

    e_score_correction_bias += u * sign(mean load - load)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .data import TOPICS, Windows, load_sizes, load_tokens
from .evaluate import evaluate
from .folders import DATA, RUN
from .model import Model, ModelConfig
from .muon import Muon
from .progress import reporter

# glibc returns big buffers to the kernel and asks for them again at every step. Keeping them
# makes training almost twice as fast; other C libraries ignore these.
KEEP_BUFFERS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "500000000",
}
REPORT_EVERY = 20  # steps between two records
BIAS_FREEZE = 0.95  # share of the run after which the routing bias stays as it is


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that determines the result of a run."""

    steps: int = 4200
    batch: int = 4  # windows a step
    length: int = 512  # tokens a window
    seed: int = 1
    muon_lr: float = 0.02
    adam_lr: float = 8e-3
    # The DeepSeek-V3 report uses 1e-3, which is too slow to balance so short a run.
    bias_u: float = 5e-3

    def lr_scale(self, step: int) -> float:
        """Factor of the learning rates at ``step``: short warm-up, flat, linear decay from 40 %."""
        warm_up = min(1.0, (step + 1) / 30)
        decay = min(1.0, max(0.02, (1 - step / self.steps) / 0.6))
        return warm_up * decay

    def momentum(self, step: int) -> float:
        """Muon's momentum at ``step``."""
        return min(0.95, 0.85 + 0.1 * step / 150)


class Trainer:
    """The model, its two optimizers and its data, advanced one step at a time.

    Muon takes the matrices of the body; Adam takes the rest: embeddings, head, routers and norms.
    """

    def __init__(self, hyper: Hyperparameters, data: Path) -> None:
        self.hyper = hyper
        self.step = 0
        self.model = Model(ModelConfig(), hyper.seed)
        self.windows = Windows(
            [load_tokens(data, topic, "train") for topic in TOPICS], hyper.length, hyper.seed
        )
        body, groups = [], []
        for name, p in self.model.named_parameters():
            if p.dim() >= 2 and not name.endswith(
                ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
            ):
                body.append((name, p))
                continue
            factor = 1.0
            if name.endswith("embed_tokens.weight"):
                factor = 2.0
            elif name.endswith("mlp.gate.weight"):
                factor = 0.25
            groups.append({"params": [p], "factor": factor})
        self.muon = Muon(body, hyper.muon_lr)
        self.adam = torch.optim.Adam(groups, lr=hyper.adam_lr, betas=(0.9, 0.95), eps=1e-10)

    def advance(self) -> tuple[float, Tensor]:
        """Do one step; its loss in nats a token and the expert load, float [layers, experts]."""
        hyper, scale = self.hyper, self.hyper.lr_scale(self.step)
        batch = self.windows.next(hyper.batch)
        loss = self.model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        self.muon.momentum = hyper.momentum(self.step)
        self.muon.step(scale)
        for group in self.adam.param_groups:
            group["lr"] = hyper.adam_lr * scale * group["factor"]
        self.adam.step()
        self.model.zero_grad(set_to_none=True)

        layers = self.model.moe_layers
        load = torch.stack([layer.load for layer in layers]).float()
        if self.step / hyper.steps < BIAS_FREEZE:
            for layer, counts in zip(layers, load, strict=True):
                change = torch.sign(counts.mean() - counts)
                layer.gate.e_score_correction_bias += hyper.bias_u * scale * change
        self.step += 1
        return loss.item(), load

    def save(self, path: Path) -> None:
        """Write a checkpoint; a run killed while writing leaves the previous one intact."""
        state = {
            "hyper": asdict(self.hyper),
            "step": self.step,
            "model": self.model.state_dict(),
            "muon": self.muon.state(),
            "adam": self.adam.state_dict(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of a run with the same hyper-parameters."""
        state = torch.load(path)
        if state["hyper"] != asdict(self.hyper):
            raise SystemExit(f"{path} belongs to a run with other hyper-parameters")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.muon.load_state(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.windows.skip(self.step * self.hyper.batch)


def train(
    hyper: Hyperparameters, data: Path, out: Path, stop: int, eval_every: int, save_every: int
) -> None:
    """Run to the last step (or to ``stop``); leave checkpoint, log and final figures in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    sizes = load_sizes(data)
    train_bytes = sum(size.train_bytes for size in sizes.values())
    train_tokens = sum(size.train_tokens for size in sizes.values())
    to_bits_per_byte = train_tokens / train_bytes / math.log(2)

    trainer = Trainer(hyper, data)
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
    losses: deque[float] = deque(maxlen=REPORT_EVERY)
    loads: deque[Tensor] = deque(maxlen=REPORT_EVERY)
    started = reported = time.monotonic()
    reported_step = trainer.step
    with (
        reporter(hyper.steps) as report,
        (out / "log.jsonl").open("a", encoding="utf-8") as log,
    ):
        while trainer.step < min(hyper.steps, stop):
            loss, load = trainer.advance()
            losses.append(loss)
            loads.append(load)
            recent = sum(losses) / len(losses)
            report.advance(trainer.step, recent * to_bits_per_byte)
            if trainer.step % REPORT_EVERY == 0 or trainer.step == 1:
                now = time.monotonic()
                tokens = (trainer.step - reported_step) * hyper.batch * hyper.length
                mean_load = torch.stack(list(loads)).mean(0)
                record: dict[str, Any] = {
                    "step": trainer.step,
                    "minutes": round((now - started) / 60, 2),
                    "loss": round(recent, 4),
                    "bits_per_byte": round(recent * to_bits_per_byte, 4),
                    "lr_scale": round(hyper.lr_scale(trainer.step - 1), 3),
                    "tokens_per_s": round(tokens / (now - reported)),
                    "max_over_mean_load": [
                        round(float(row.max() / row.mean()), 2) for row in mean_load
                    ],
                }
                if trainer.step % eval_every == 0:
                    results = evaluate(trainer.model, data, sizes, hyper.length, limit=4)
                    record["held_out"] = {t: round(r.bits_per_byte, 4) for t, r in results.items()}
                report.record(record)
                log.write(json.dumps(record) + "\n")
                log.flush()
                reported, reported_step = time.monotonic(), trainer.step
            if trainer.step % save_every == 0:
                trainer.save(checkpoint)
    trainer.save(checkpoint)
    results = evaluate(trainer.model, data, sizes, hyper.length)
    held_out = {topic: result.bits_per_byte for topic, result in results.items()}
    final = {
        "steps": trainer.step,
        "tokens": trainer.step * hyper.batch * hyper.length,
        "held_out_bits_per_byte": held_out,
        "mean": sum(held_out.values()) / len(held_out),
    }
    (out / "final.json").write_text(json.dumps(final, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(final), flush=True)


def keep_buffers() -> None:
    """Restart this process with ``KEEP_BUFFERS``, which take effect only at its start."""
    if not KEEP_BUFFERS.keys() & os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **KEEP_BUFFERS})


def main() -> None:
    """Command line."""
    keep_buffers()
    parser = argparse.ArgumentParser(description="Train the demonstration model.")
    parser.add_argument("--data", type=Path, default=DATA, help="output of tokenizer.py")
    parser.add_argument("--out", type=Path, default=RUN, help="checkpoint and log")
    parser.add_argument("--steps", type=int, default=Hyperparameters.steps)
    parser.add_argument("--seed", type=int, default=Hyperparameters.seed)
    parser.add_argument("--stop", type=int, default=sys.maxsize, help="stop early, at this step")
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=200)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    hyper = Hyperparameters(steps=args.steps, seed=args.seed)
    train(hyper, args.data, args.out, args.stop, args.eval_every, args.save_every)


if __name__ == "__main__":
    main()
