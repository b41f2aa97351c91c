"""``moemesh reference``: the whole model in one process, to compare the mesh with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tokenizers.decoders import DecodeStream

from compose.model import served_model
from compose.options import Source, UsageError
from mesh.messages import SEED_MASK
from moe_model.errors import CheckpointError
from moe_model.shipped import checkpoint_dir
from moe_model.text_files import read_tokenizer


def reference(
    *,
    source: Source = Source(),  # noqa: B008 (frozen)
    prompt: Annotated[str, Parameter(help="Text to complete.")],
    model: Annotated[
        Path | None,
        Parameter(help="Directory of a Hugging Face checkpoint; else the model that ships."),
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Most tokens to make.")] = 60,
    temperature: Annotated[
        float | None,
        Parameter(help="0: always the likeliest token. Else as the checkpoint recommends."),
    ] = None,
    top_p: Annotated[
        float | None,
        Parameter(help="Share of probability to draw from. Else as the checkpoint recommends."),
    ] = None,
    seed: Annotated[int, Parameter(help="Seed of the draws, as a request's.")] = 0,
    ids: Annotated[
        bool, Parameter(negative=(), help="Print token ids, one a line, instead of text.")
    ] = False,
) -> int:
    """Complete a prompt with the whole model in this one process.

    A request with the same seed draws the same tokens: exactly so with model.exact, else unless
    the last bits of a log-probability decide between two of them.
    """
    for flag, value, accepted in (
        ("--max-tokens", max_tokens, max_tokens > 0),
        ("--temperature", temperature, temperature is None or 0 <= temperature <= 100),
        ("--top-p", top_p, top_p is None or 0 < top_p <= 1),
        ("--seed", seed, -(2**63) <= seed < 2**63),
    ):
        if not accepted:
            raise UsageError(f"{flag} {value}: out of range")
    flags, names = {"model.path": model}, {"model.path": "--model"}
    source.refuse_conflicts(flags, names)
    settings = source.effective(flags, names).settings
    served_model(settings)
    path = checkpoint_dir(settings.model.path)
    try:
        from moe_model.reference import ReferenceModel  # noqa: PLC0415 (torch, after the checks)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install 'moemesh[cpu]'", exit_code=1
        ) from None

    tokenizer = read_tokenizer(path)
    tokenizer.no_truncation()
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
    sampling = whole.model.spec.sampling.filled()
    sampling = msgspec.structs.replace(
        sampling,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p if top_p is None else top_p,
        seed=seed & SEED_MASK,
    )
    stream = DecodeStream(skip_special_tokens=True)
    try:
        for token in whole.generate(prompt_ids, max_tokens, sampling=sampling):
            text = f"{token}\n" if ids else stream.step(tokenizer, token)
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
    except ArithmeticError as error:
        raise UsageError(str(error), exit_code=1) from None
    if not ids:
        sys.stdout.write("\n")
    return 0
