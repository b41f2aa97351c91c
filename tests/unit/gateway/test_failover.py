"""Routers that come, go, hang and refuse, under a real gateway with real clients."""

import signal
import socket
import threading

import openai
import pytest

from mesh.listener import bound_socket
from mesh.messages import Member, Placement, Rejected
from mesh.supervise import ExitCode
from moe_model.spec import serving_digest
from tests.unit.gateway.scripted_mesh import (
    DEADLINE_S,
    MODEL,
    STORY,
    Script,
    free_port,
    wait_until,
)

CHAT = {
    "model": "tales",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 200,
}


def has_ipv6():
    try:
        free_port("::1")
    except OSError:
        return False
    return True


def ask(mesh, results, **options):
    """A streamed chat in a thread; its text, or its error, lands in ``results``."""

    def run():
        text = ""
        try:
            with mesh.client() as client:
                for chunk in client.chat.completions.create(**CHAT, stream=True, **options):
                    text += chunk.choices[0].delta.content or ""
                    results["so far"] = text
            results["text"] = text
        except openai.APIError as error:
            results["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_stream_survives_its_router_without_gap_or_repeat(own_mesh):
    first = own_mesh.add_router("router-0")
    own_mesh.start_gateway()
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, stop_token=1, hold_after=7)
    results = {}
    thread = ask(own_mesh, results)
    wait_until(lambda: results.get("so far"), "the first tokens")
    own_mesh.answer = own_mesh.tell_story
    second = own_mesh.add_router("router-1")
    own_mesh.remove_router("router-0")
    thread.join(DEADLINE_S)
    assert results.get("text") == STORY, results
    (again,) = second.submits
    assert again.output == tuple(own_mesh.story[: len(again.output)])
    assert again.sampling == first.submits[0].sampling
    assert again.request != first.submits[0].request


def test_without_another_router_the_stream_ends_with_its_time(own_mesh):
    own_mesh.add_router("router-0")
    own_mesh.start_gateway(gateway__router_wait_s=0, gateway__request_timeout_s=0.7)
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, hold_after=7)
    results = {}
    thread = ask(own_mesh, results)
    wait_until(lambda: results.get("so far"), "the first tokens")
    own_mesh.remove_router("router-0")
    thread.join(DEADLINE_S)
    assert "took too long" in results["error"].message
    assert STORY.startswith(results["so far"])


def test_a_planner_that_begins_anew_is_told_the_placement_and_believed(own_mesh):
    own_mesh.planner.placement = Placement(
        epoch=3,
        moe_layers=(1,),
        num_experts=2,
        ranks=("e0",),
        slots_per_rank=(2,),
        physical_to_logical=((0, 1),),
    )
    own_mesh.add_router("router-0")
    own_mesh.start_gateway()
    own_mesh.wait_ready()
    own_mesh.call(own_mesh.planner.begin_anew)
    wait_until(lambda: len(own_mesh.planner.hellos) > 1, "the gateway says Hello again")
    assert own_mesh.planner.hellos[-1].placement == own_mesh.planner.placement
    wait_until(lambda: own_mesh.status("/ready") == 503, "the view without a router counts")


def test_readiness_follows_the_routers(own_mesh):
    own_mesh.start_gateway(gateway__router_wait_s=0)
    assert own_mesh.status("/health") == 200
    assert own_mesh.status("/ready") == 503
    with (
        own_mesh.client() as client,
        pytest.raises(openai.InternalServerError, match="no router has joined") as caught,
    ):
        client.chat.completions.create(**CHAT)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    router = own_mesh.add_router("router-0")
    own_mesh.wait_ready()
    own_mesh.call(lambda: router.tell(ready=False, reason="no expert serves layer 2"))
    wait_until(lambda: own_mesh.status("/ready") == 503, "the router is not ready")
    own_mesh.call(lambda: router.tell(ready=True))
    own_mesh.wait_ready()
    assert own_mesh.planner.hellos[0].role == "gateway"
    assert own_mesh.planner.hellos[0].control == own_mesh.url
    assert own_mesh.planner.hellos[0].model_digest == serving_digest(
        MODEL, "auto", exact=False, tp=1
    )


def test_a_request_waits_for_the_first_router(own_mesh):
    own_mesh.start_gateway(gateway__router_wait_s=10)
    results = {}
    thread = ask(own_mesh, results)
    wait_until(
        lambda: any(beat.load.waiting == 1 for beat in own_mesh.planner.heartbeats),
        "the request waits",
    )
    own_mesh.add_router("router-0")
    thread.join(DEADLINE_S)
    assert results.get("text") == STORY, results


def test_a_full_router_is_passed_over(own_mesh):
    full, free = own_mesh.add_router("router-0"), own_mesh.add_router("router-1")
    full.answer = lambda _: Rejected(request="", reason="full", retry_after_s=1)
    own_mesh.start_gateway()
    wait_until(lambda: own_mesh.status("/ready") == 200, "ready")
    with own_mesh.client() as client:
        for _ in range(4):
            answer = client.chat.completions.create(**CHAT)
            assert answer.choices[0].message.content == STORY
    assert len(free.submits) == 4


def test_requests_with_a_common_prefix_meet_on_one_router(own_mesh):
    own_mesh.add_router("router-0")
    own_mesh.add_router("router-1")
    own_mesh.start_gateway()
    own_mesh.wait_ready()
    prefixes = [list(range(100, 148)), list(range(200, 248))]
    with own_mesh.client() as client:
        wait_until(lambda: len(own_mesh.busy_routers(client)) == 2, "both routers take work")
        own_mesh.reset()
        for turn in range(3):
            for prefix in prefixes:
                client.completions.create(model="tales", prompt=[*prefix, turn])
    where = {
        tuple(submit.prompt[:48]): id_
        for id_, router in own_mesh.routers.items()
        for submit in router.submits
    }
    for id_, router in own_mesh.routers.items():
        assert all(where[tuple(submit.prompt[:48])] == id_ for submit in router.submits)


def test_a_request_that_takes_too_long_ends(own_mesh):
    own_mesh.add_router("router-0")
    own_mesh.start_gateway(gateway__request_timeout_s=0.5)
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, hold_after=0)
    with own_mesh.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**CHAT)
    assert caught.value.status_code == 504
    wait_until(own_mesh.idle, "the sequence is cancelled")


def test_stopping_lets_streams_finish_and_leaves_cleanly(own_mesh):
    router = own_mesh.add_router("router-0")
    own_mesh.start_gateway()
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, stop_token=1, hold_after=7)
    results = {}
    thread = ask(own_mesh, results)
    wait_until(lambda: results.get("so far"), "the first tokens")
    own_mesh.gateway.send_signal(signal.SIGTERM)
    wait_until(
        lambda: any(beat.state == "draining" for beat in own_mesh.planner.heartbeats),
        "the gateway drains",
    )
    own_mesh.call(router.release)
    thread.join(DEADLINE_S)
    assert results.get("text") == STORY, results
    assert own_mesh.gateway.wait(DEADLINE_S) == 0


def test_a_gateway_that_leaves_ends_its_streams_while_another_takes_its_connections(own_mesh):
    router = own_mesh.add_router("router-0")
    with bound_socket("127.0.0.1", 0) as listener:
        own_mesh.start_gateway(listener=listener)
        own_mesh.wait_ready()
        own_mesh.answer = lambda _: Script(own_mesh.story, stop_token=1, hold_after=7)
        results, late = {}, {}
        thread = ask(own_mesh, results)
        wait_until(lambda: results.get("so far"), "the first tokens")
        leaves = own_mesh.gateway
        leaves.send_signal(signal.SIGTERM)
        wait_until(
            lambda: any(beat.state == "draining" for beat in own_mesh.planner.heartbeats),
            "the gateway drains",
        )
        waits = ask(own_mesh, late)  # nobody takes connections now, and none is refused
        own_mesh.start_gateway(id_="gateway-1", listener=listener)
        wait_until(lambda: late.get("so far"), "the other gateway to answer")
        assert leaves.poll() is None
        own_mesh.call(router.release)
        thread.join(DEADLINE_S)
        waits.join(DEADLINE_S)
    assert results.get("text") == late.get("text") == STORY, (results, late)
    assert leaves.wait(DEADLINE_S) == 0


def test_a_gateway_that_is_drained_says_so_and_answers_all_the_same(own_mesh):
    own_mesh.add_router("router-0")
    own_mesh.start_gateway()
    own_mesh.wait_ready()
    (hello,) = own_mesh.planner.hellos

    def show(state):
        own_mesh.planner.members[hello.id] = Member(
            id=hello.id, role="gateway", incarnation=hello.incarnation, pid=1, host="h", state=state
        )
        own_mesh.planner.publish()

    own_mesh.call(show, "draining")
    wait_until(lambda: own_mesh.status("/ready") == 503, "it is not ready")
    with own_mesh.client() as client:
        assert client.chat.completions.create(**CHAT).choices[0].message.content
    own_mesh.call(show, "ready")
    own_mesh.wait_ready()


def test_a_stream_that_outlasts_the_grace_ends_with_an_error(own_mesh):
    own_mesh.add_router("router-0")
    own_mesh.start_gateway(finish_s=0.1)
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, hold_after=7)
    results = {}
    thread = ask(own_mesh, results)
    wait_until(lambda: results.get("so far"), "the first tokens")
    own_mesh.gateway.send_signal(signal.SIGINT)
    assert own_mesh.gateway.wait(DEADLINE_S) == 0
    thread.join(DEADLINE_S)
    assert "stopping" in results["error"].message
    wait_until(own_mesh.idle, "the sequence is cancelled")


def test_clients_of_a_fenced_gateway_hear_of_it(own_mesh):
    own_mesh.add_router("router-0")
    own_mesh.start_gateway()
    own_mesh.wait_ready()
    own_mesh.answer = lambda _: Script(own_mesh.story, hold_after=7)
    results = {}
    thread = ask(own_mesh, results)
    wait_until(lambda: results.get("so far"), "the first tokens")
    own_mesh.call(own_mesh.planner.fence)
    assert own_mesh.gateway.wait(DEADLINE_S) == ExitCode.REFUSED
    thread.join(DEADLINE_S)
    assert "stopping" in results["error"].message
    assert "Traceback" not in own_mesh.log_path.read_text()
    assert "fenced by the test" in own_mesh.log_path.read_text()


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_the_url_of_an_ipv6_address_can_be_opened(own_mesh):
    own_mesh.start_gateway(gateway__host="::1")
    assert own_mesh.url.startswith("http://[::1]:")
    wait_until(lambda: own_mesh.planner.hellos, "the gateway says Hello")
    assert own_mesh.planner.hellos[0].control == own_mesh.url


def test_a_taken_port_is_said(own_mesh):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        gateway = own_mesh.spawn_gateway(port)
        assert gateway.wait(DEADLINE_S) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in gateway.stderr.read()


def test_the_process_stays_small_and_free_of_torch(own_mesh):
    own_mesh.add_router("router-0")
    own_mesh.start_gateway()
    own_mesh.wait_ready()
    with own_mesh.client() as client:
        client.chat.completions.create(**CHAT)
    status = own_mesh.proc("status")
    resident_kib = int(status.split("VmRSS:")[1].split()[0])
    assert resident_kib < 120 * 1024
    assert "torch" not in own_mesh.proc("maps")
