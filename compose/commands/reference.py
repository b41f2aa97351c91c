"""``moemesh reference``: the whole model in one process, to compare the mesh with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from compose.model import served_model
from compose.options import Source, UsageError
from moe_model.errors import CheckpointError
from moe_model.shipped import checkpoint_dir


def reference(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    prompt: Annotated[str, Parameter(help="Text to complete.")],
    model: Annotated[
        Path | None,
        Parameter(help="Directory of a Hugging Face checkpoint; else the model that ships."),
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Most tokens to make.")] = 60,
    temperature: Annotated[float, Parameter(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, Parameter(help="Share of probability to draw from.")] = 1.0,
    seed: Annotated[int, Parameter(help="Seed of the draws.")] = 0,
    ids: Annotated[
        bool, Parameter(negative=(), help="Print token ids, one a line, instead of text.")
    ] = False,
) -> int:
    """Complete a prompt with the whole model in this one process."""
    for flag, value, accepted in (
        ("--max-tokens", max_tokens, max_tokens > 0),
        ("--temperature", temperature, temperature >= 0),
        ("--top-p", top_p, 0 < top_p <= 1),
    ):
        if not accepted:
            raise UsageError(f"{flag} {value}: out of range")
    settings = source.effective({"model.path": model}, {"model.path": "--model"}).settings
    served_model(settings)
    path = checkpoint_dir(settings.model.path)
    try:
        from moe_model.reference import ReferenceModel  # noqa: PLC0415 (torch, after the checks)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install 'moemesh[cpu]'", exit_code=1
        ) from None

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    with Progress(
        TextColumn("loading"), BarColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        bar = progress.add_task("", total=1.0)
        try:
            whole = ReferenceModel(
                path,
                weights=settings.model.weights,
                exact=settings.model.exact,
                progress=lambda share: progress.update(bar, completed=share),
            )
        except CheckpointError as error:
            raise UsageError(f"model.path: {error}") from None
    prompt_ids: list[int] = tokenizer.encode(prompt).ids
    if not 0 < len(prompt_ids) < whole.model.spec.max_context:
        raise UsageError(
            f"--prompt: {len(prompt_ids)} tokens; expected 1 to "
            f"{whole.model.spec.max_context - 1} (the context less one)"
        )
    stream = DecodeStream(skip_special_tokens=True)
    for token in whole.generate(
        prompt_ids, max_tokens, temperature=temperature, top_p=top_p, seed=seed
    ):
        text = f"{token}\n" if ids else stream.step(tokenizer, token)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
    if not ids:
        sys.stdout.write("\n")
    return 0
