"""Many clients at once, some of which leave: nothing is left behind in any process."""

from __future__ import annotations

import asyncio
import random

import openai

from tests.support.meshes import Mesh

REQUESTS = 64


async def one_client(client: openai.AsyncOpenAI, model: str, index: int) -> str:
    """Run one request; a third of them leave in the middle, streaming or not."""
    rng = random.Random(index)
    prompt = [rng.randrange(8, 3000) for _ in range(rng.choice([1, 7, 16, 100, 400, 800]))]
    tokens = rng.choice([1, 8, 40, 120])
    if index % 3 == 1:
        stream = await client.completions.create(
            model=model, prompt=prompt, max_tokens=tokens, stream=True, extra_body={"seed": index}
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 3:
                await stream.close()
                return "left"
        return "done"
    call = client.completions.create(model=model, prompt=prompt, max_tokens=tokens, seed=index)
    if index % 3 == 2:
        try:
            await asyncio.wait_for(call, rng.uniform(0.02, 0.6))
        except TimeoutError:
            return "left"
        return "done"
    answer = await call
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= tokens
    assert answer.choices[0].finish_reason in {"stop", "length"}
    return "done"


def test_64_clients_with_cancellations_leave_nothing_behind(demo_mesh: Mesh) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=demo_mesh.url + "/v1", api_key="unused", max_retries=0, timeout=120
        ) as client:
            model = (await client.models.list()).data[0].id
            return await asyncio.gather(*(one_client(client, model, i) for i in range(REQUESTS)))

    outcomes = asyncio.run(run())
    assert "left" in outcomes
    assert outcomes.count("done") >= REQUESTS // 3

    def idle() -> bool:
        loads = [member["load"] for member in demo_mesh.members("router")]
        return all(
            load.get("running", 0)
            == load.get("waiting", 0)
            == load.get("lane_slots_in_use", 0)
            == 0
            and load["kv_blocks_free"] == load["kv_blocks_total"]
            for load in loads
        )

    demo_mesh.wait_for(idle, "every KV block, lane slot and request to be free")
