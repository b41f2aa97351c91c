"""Placements that change all the time: the tokens stay the reference's, and nothing leaks."""

from __future__ import annotations

import random
import time

from mesh.messages import Member, Placement, View
from moe_model.experts import LocalExperts, new_bank

DEADLINE_S = 20.0
EPOCHS = 250


class MovingMesh:
    """Workers with two halves of slots: an epoch's experts are in one of them, the next epoch's are
    loaded into the other, as a planner would have them moved.
    """

    def __init__(self, mesh, reference, rng: random.Random) -> None:
        self.mesh = mesh
        self.rng = rng
        self.experts = mesh.spec.num_experts
        self.layers = mesh.spec.moe_layers
        assert isinstance(reference.experts, LocalExperts)
        self.weights = {
            layer: [bank._experts[e] for e in range(self.experts)]
            for layer, bank in reference.experts._banks.items()
        }
        self.epoch = 0

    def start(self, name: str) -> None:
        banks = {
            layer: new_bank(self.mesh.spec, 2 * self.experts, exact=self.mesh.exact)
            for layer in self.layers
        }
        self.mesh.workers[name] = self.mesh.fleet.worker(name, banks)

    def leave(self, name: str) -> None:
        """The worker stops; the next view does not have it."""
        self.mesh.workers.pop(name).stop()

    def move(self, ranks: list[str]) -> None:
        """Place at random on ``ranks``, load, publish; both as a whole, in an order that serves."""
        self.epoch += 1
        begin = self.epoch % 2 * self.experts
        rows = []
        for layer in self.layers:
            held: dict[str, list[int]] = {rank: [] for rank in ranks}
            for expert in range(self.experts):
                for rank in self.rng.sample(ranks, self.rng.choice([1, 1, 2]) % len(ranks) or 1):
                    held[rank].append(expert)
            row: list[int] = []
            for rank, experts in held.items():
                self.rng.shuffle(experts)
                worker = self.mesh.workers[rank]
                slots = [-1] * (2 * self.experts)
                slots[begin : begin + len(experts)] = experts
                with worker.busy:  # it loads between two parts
                    bank = worker.banks[layer]
                    for slot in range(begin, begin + self.experts):
                        bank.clear(slot)
                        if slots[slot] >= 0:
                            bank.install(slot, slots[slot], self.weights[layer][slots[slot]])
                row += slots
            rows.append(tuple(row))
        placement = Placement(
            epoch=self.epoch,
            moe_layers=self.layers,
            num_experts=self.experts,
            ranks=tuple(ranks),
            slots_per_rank=(2 * self.experts,) * len(ranks),
            physical_to_logical=tuple(rows),
        )
        members = tuple(
            Member(
                id=name,
                role="expert",
                incarnation=worker.incarnation,
                pid=1,
                host="",
                state="ready",
                lanes=worker.path,
            )
            for name, worker in self.mesh.workers.items()
        )
        self.mesh.engine.set_view(View(version=self.epoch, members=members, placement=placement))

    def wait_for_epoch(self, dispatches: int = 0) -> None:
        """Until the router uses the newest placement, as its heartbeat would say, and has sent some
        layers by it unless there is nothing to send.
        """
        engine, sequences = self.mesh.engine, self.mesh.sequences
        enough = engine.tally.dispatches + dispatches
        deadline = time.monotonic() + DEADLINE_S
        while engine.state.epoch < self.epoch or (
            engine.tally.dispatches < enough and not all(s.over for s in sequences.values())
        ):
            assert time.monotonic() < deadline, "the router does not get on"
            with self.mesh._news:
                self.mesh._news.wait(0.002)


def test_tokens_stay_equal_while_placements_and_ranks_change(start_engine, reference) -> None:
    rng = random.Random(11)
    mesh = start_engine(micro_batches="2", capacity_tokens=24)
    moving = MovingMesh(mesh, reference, rng)
    for name in ("a", "b", "c"):
        moving.start(name)
    moving.move(["a", "b", "c"])
    wanted: dict[str, tuple[list[int], int]] = {}
    running: list[str] = []
    for epoch in range(EPOCHS):
        for name in [name for name in running if mesh.sequences[name].over]:
            running.remove(name)
        while len(running) < 4:
            name = str(len(wanted))
            prompt = [rng.randrange(2, 3000) for _ in range(rng.randint(1, 40))]
            wanted[name] = (prompt, rng.randint(8, 30))
            mesh.submit(name, prompt, max_tokens=wanted[name][1])
            running.append(name)
        if epoch == EPOCHS // 3:
            moving.start("d")  # it is in the placement before there is a lane to it
        if epoch == EPOCHS * 2 // 3:
            moving.move(["b", "c", "d"])
            moving.wait_for_epoch()
            moving.leave("a")
        names = list(mesh.workers)
        moving.move(rng.sample(names, rng.randint(1, len(names))))
        if rng.random() < 0.8:  # else the next one takes slots from under what is on its way
            moving.wait_for_epoch(dispatches=2)
    mesh.finish()
    assert mesh.engine.tally.stale > 0  # some parts met slots that had moved on
    for name, (prompt, tokens) in list(wanted.items())[:12] + list(wanted.items())[-6:]:
        expected = list(reference.generate(prompt, tokens, ignore_eos=True))
        assert mesh.sequences[name].tokens == expected
        assert mesh.sequences[name].finish == "length"
    assert all(sequence.finish == "length" for sequence in mesh.sequences.values())
    mesh.wait(lambda: mesh.engine.state.running == 0)
    mesh.wait(lambda: mesh.engine.state.lane_slots_in_use == 0)
    assert mesh.engine.state.kv_blocks_free == mesh.engine.state.kv_blocks_total


def test_an_idle_router_switches_at_once(start_engine, reference) -> None:
    mesh = start_engine()
    moving = MovingMesh(mesh, reference, random.Random(1))
    moving.start("a")
    for _ in range(5):
        moving.move(["a"])
        moving.wait_for_epoch()
    assert mesh.engine.state.step == 0
