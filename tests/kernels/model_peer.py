"""An expert worker's process that serves a model's experts on its CPU, over the symm plane too:
that is quicker than interpreting kernels. Whoever started it says what its slots hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from ep_kernels.plane import AnswerStatus
from ep_kernels.shm.expert import ShmExpertPlane

from moe_model.experts import LocalExperts, new_bank
from moe_model.spec import load_spec

DIGEST = "model"


def serve_over_symm(pipe: Connection, name: str, path: str, model: Path) -> None:
    """See ``_serve``."""
    # Imported here: who uses the other has no Triton.
    from ep_kernels.triton.device import open_device
    from ep_kernels.triton.symm import SymmExpertPlane

    device = open_device("interpreter")

    def plane(hidden: int) -> ShmExpertPlane:
        return SymmExpertPlane(name, 1, path, hidden, DIGEST, device=device)

    _serve(pipe, path, model, plane)


def serve_over_shm(pipe: Connection, name: str, path: str, model: Path) -> None:
    """See ``_serve``."""
    _serve(pipe, path, model, lambda hidden: ShmExpertPlane(name, 1, path, hidden, DIGEST))


@torch.inference_mode()
def _serve(
    pipe: Connection, path: str, model: Path, new_plane: Callable[[int], ShmExpertPlane]
) -> None:
    """Tells that it listens at ``path``. Lists of logical experts that come through ``pipe`` are
    what slots of every layer hold from then on; each is answered.
    """
    torch.set_num_threads(1)
    spec, local = load_spec(model), LocalExperts.load(model, weights="fp32")
    plane = new_plane(spec.hidden_size)
    lock, stopping = threading.Lock(), threading.Event()
    banks = {layer: new_bank(spec, 0, weights="fp32") for layer in spec.moe_layers}

    def hold(slots: list[int]) -> None:
        with lock:
            for layer, source in local._banks.items():
                bank = banks[layer] = new_bank(spec, len(slots), weights="fp32")
                for slot, expert in enumerate(slots):
                    bank.install(slot, expert, source._experts[expert])

    def follow() -> None:
        try:
            while True:
                hold(pipe.recv())
                pipe.send("held")
        except EOFError:
            stopping.set()
            plane.wake()

    pipe.send(path)
    threading.Thread(target=follow, daemon=True).start()
    while not stopping.is_set():
        plane.wait(5.0)
        for part in plane.poll():
            with lock:
                bank = banks[part.layer]
                fits = bank.matches(part.pair_slot, part.pair_expert)
                if fits:
                    bank.run(part.x, part.pair_token, part.pair_slot, part.pair_weight, part.out)
            plane.answer(part, AnswerStatus.OK if fits else AnswerStatus.STALE, 7, 0)
    plane.close()
