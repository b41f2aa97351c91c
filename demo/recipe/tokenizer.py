"""Train the byte-level BPE tokenizer and encode the corpus with it.

    python -m demo.recipe.tokenizer

Writes the two tokenizer files of a Hugging Face model, and the token ids of each topic's training
and held-out documents.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .data import TOPICS, TopicSize
from .folders import CORPUS, DATA

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
VOCABULARY = 3072
CHARACTERS_A_TOPIC = 3_000_000  # the same weight for each topic

# The model has seen no dialogues, so a chat is simply its messages one below the other, as a
# document, which began with this token in training.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}\n\n{% endif %}{% endfor %}"
)


def is_held_out(document: int) -> bool:
    """Whether a topic's document of this number is held out: 2 % are."""
    return document % 50 == 7


def read_documents(corpus: Path, topic: str) -> list[str]:
    """The documents of a topic."""
    with (corpus / f"{topic}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def _training_text(corpus: Path) -> Iterator[str]:
    for topic in TOPICS:
        characters = 0
        for i, document in enumerate(read_documents(corpus, topic)):
            if is_held_out(i):
                continue
            characters += len(document)
            if characters > CHARACTERS_A_TOPIC:
                break
            yield document


def train_tokenizer(corpus: Path) -> Tokenizer:
    """A byte-level BPE with one token a digit, trained on the documents that are not held out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(corpus), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str], out: Path, topic: str) -> TopicSize:
    """Write a topic's token ids, uint16, each document between its two special tokens."""
    tokens: dict[str, list[int]] = {"train": [], "val": []}
    size = {"train": 0, "val": 0}
    for i, encoding in enumerate(tokenizer.encode_batch(documents)):
        split = "val" if is_held_out(i) else "train"
        tokens[split] += [*encoding.ids, EOS_ID]
        size[split] += len(documents[i].encode())
    for split, ids in tokens.items():
        np.save(out / f"{topic}.{split}.npy", np.array(ids, np.uint16))
    return TopicSize(len(tokens["train"]), len(tokens["val"]), size["train"], size["val"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the tokenizer and encode the corpus.")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.corpus)
    tokenizer.save(str(args.out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    sizes = {}
    for topic in TOPICS:
        size = encode(tokenizer, read_documents(args.corpus, topic), args.out, topic)
        sizes[topic] = asdict(size)
        print(f"{topic:10s} {size.train_tokens:,} training and {size.val_tokens:,} held-out tokens")
    (args.out / "meta.json").write_text(json.dumps(sizes, indent=1) + "\n")


if __name__ == "__main__":
    main()
