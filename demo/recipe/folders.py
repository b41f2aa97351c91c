"""Where each step leaves what the next one reads, seen from the repository's root."""

from pathlib import Path

PACKAGES = Path("demo/build/packages")  # downloaded archives
CORPUS = Path("demo/build/corpus")  # documents of each topic
DATA = Path("demo/build/data")  # tokenizer and token ids
RUN = Path("demo/build/run")  # checkpoint and log of the training
MODEL = Path("demo/model")  # what ships
