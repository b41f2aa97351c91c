from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.placement import fault
from mesh.placement_json import sglang_map
from planner_svc.formats import FormatError, Initial, Shape, read_initial

SHAPE = Shape(moe_layers=(1, 2), num_layers=3, num_experts=4)
ROWS = ((0, 1, 2, 3, 0, 2), (3, 2, 1, 0, 3, 1))
IDLE = (0, 1, 2, 3, 0, 1)


def ascend(*layers: tuple[int, tuple[tuple[int, ...], ...]]) -> dict[str, object]:
    return {
        "moe_layer_count": len(layers),
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": len(devices),
                "device_list": [
                    {"device_id": number, "device_expert": list(experts)}
                    for number, experts in enumerate(devices)
                ],
            }
            for layer, devices in layers
        ],
    }


FIRST, SECOND = ((0, 1, 2), (3, 0, 2)), ((3, 2, 1), (0, 3, 1))


@pytest.mark.parametrize(
    "document",
    [
        {"physical_to_logical_map": ROWS},
        {"physical_to_logical_map": (IDLE, *ROWS)},
        ascend((0, FIRST), (1, SECOND)),
        ascend((1, FIRST), (2, SECOND)),
        ascend((2, SECOND), (1, FIRST)),
    ],
    ids=["sglang", "sglang, all layers", "ascend", "ascend, model's numbers", "ascend, unsorted"],
)
def test_json_from_a_file_or_inline_gives_the_rows_of_the_moe_layers(
    document: dict[str, object], tmp_path: Path
) -> None:
    text = json.dumps(document, indent=1)
    file = tmp_path / "map.any"
    file.write_text(text)
    for source in (text, str(file)):
        initial = read_initial(source, SHAPE)
        assert initial.rows == ROWS
        placement = initial.placement(["a", "b"], 7)
        assert (placement.epoch, placement.slots_per_rank) == (7, (3, 3))
        assert fault(placement) == ""
        assert placement.moe_layers == (1, 2)


def test_what_is_written_for_sglang_is_read_back() -> None:
    placement = Initial("", SHAPE, ROWS).placement(["a", "b", "c"], 1)
    again = read_initial(json.dumps(sglang_map(placement)), SHAPE)
    assert again.placement(["a", "b", "c"], 1) == placement


def test_yaml_of_tensorrt_llm_is_by_layer_number(tmp_path: Path) -> None:
    file = tmp_path / "moe_load_balancer.yaml"
    layers = {2: list(ROWS[1]), 1: list(ROWS[0]), 3: [3, 3, 3, 3, 3, 3]}
    document = {"num_slots": 6, "initial_global_assignments": layers, "layer_updates_per_iter": 2}
    file.write_text(yaml.safe_dump(document))
    assert read_initial(str(file), SHAPE).rows == ROWS


def test_vllm_ascend_may_give_ranks_different_numbers_of_slots_and_leave_numbers_out() -> None:
    layer = {"device_list": [{"device_expert": [0, 1]}, {"device_expert": [2, 3, 0]}]}
    initial = read_initial(json.dumps({"layer_list": [layer, layer]}), SHAPE)
    assert initial.placement(["a", "b"], 1).slots_per_rank == (2, 3)
    with pytest.raises(FormatError, match="for 2 ranks, this mesh has 3"):
        initial.placement(["a", "b", "c"], 1)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("layers", [2, 3])
def test_counts_are_loads_to_plan_from(steps: int, layers: int) -> None:
    counts = np.arange(steps * layers * 4).reshape(steps, layers, 4)
    nested = counts[0].tolist() if steps == 1 else counts.tolist()
    initial = read_initial(json.dumps({"rank": 0, "logical_count": nested}), SHAPE)
    assert initial.rows is None
    assert initial.loads is not None
    np.testing.assert_array_equal(initial.loads, counts[:, -2:])


def test_trivial_says_nothing() -> None:
    initial = read_initial("trivial", SHAPE)
    assert (initial.rows, initial.loads) == (None, None)


def test_slots_that_do_not_divide_among_the_ranks_are_refused() -> None:
    initial = read_initial(json.dumps({"physical_to_logical_map": ROWS}), SHAPE)
    with pytest.raises(FormatError, match="6 slots a layer do not divide among 4 ranks"):
        initial.placement(list("abcd"), 1)


@pytest.mark.parametrize(
    ("document", "fault_"),
    [
        ({}, "expected one of the keys .* found none"),
        ({"physical_to_logical_map": ROWS, "logical_count": [[1]]}, "found physical.* and logical"),
        ({"physical_to_logical_map": ROWS[:1]}, r"1 layers; expected 2 .* or 3"),
        ({"physical_to_logical_map": [[0, 1, 2, 4], [0, 1, 2, 3]]},
         "physical_to_logical_map, layer 1: slot 3 holds expert 4; expected 0 to 3"),
        ({"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, -1]]}, "layer 2: slot 3 .* -1"),
        ({"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, 2]]}, "layer 2: no slot .* 3"),
        ({"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2, 3, 0]]}, "5 slots, 4"),
        ({"physical_to_logical_map": [[0, 1, 2, "3"], [0]]}, r"int.*physical_to_logical_map\[0\]"),
        ({"logical_count": []}, "has no step"),
        ({"logical_count": [[1, 2, 3, 4]]}, "1 layers"),
        ({"logical_count": [[1, 2, 3], [1, 2, 3]]}, "counts of 3 experts, expected 4"),
        ({"logical_count": "many"}, "logical_count: "),
        (ascend((0, FIRST)), "1 layers, the model has 2"),
        (ascend((0, FIRST), (0, SECOND)), r"layer_id: \[0, 0\]; expected 0 to 1 .* or \(1, 2\)"),
        (ascend((0, FIRST), (1, ((3, 2, 1, 0), (3, 1)))), "layer 2: .* expected the same"),
        (ascend((0, FIRST), (1, SECOND)) | {"moe_layer_count": 3}, "3, but 2 layers follow"),
    ],
)  # fmt: skip
def test_wrong_json_is_refused_by_key_and_what_was_expected(
    document: dict[str, object], fault_: str, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=fault_) as caught:
        read_initial(str(file), SHAPE)
    assert str(caught.value).startswith(str(file))


def test_wrong_devices_are_refused() -> None:
    document = ascend((0, FIRST), (1, SECOND))
    document["layer_list"][1]["device_count"] = 3  # type: ignore[index]
    with pytest.raises(FormatError, match="device_count 3, but 2 devices follow"):
        read_initial(json.dumps(document), SHAPE)
    document = ascend((0, FIRST), (1, SECOND))
    document["layer_list"][0]["device_list"][1]["device_id"] = 0  # type: ignore[index]
    with pytest.raises(FormatError, match=r"layer 1: device_id \[0\]; expected 0 to 1 each once"):
        read_initial(json.dumps(document), SHAPE)


@pytest.mark.parametrize(
    ("text", "fault_"),
    [
        ("num_slots: 6\nlayer_updates_per_iter: 1\n", "expected YAML with initial_global"),
        ("just text", "expected YAML with initial_global"),
        ("initial_global_assignments: {1: [0, 1, 2, 3]}", r"layers 1; expected .* 1, 2"),
        ("initial_global_assignments: {0: [0], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}", "layers 0, 1"),
        ("initial_global_assignments: {1: [0, 1, 2, 3], 2: [0, 1, 2, true]}", "Expected `int`"),
        ("initial_global_assignments: [1, 2]", "Expected `object`"),
        ("num_slots: 5\ninitial_global_assignments: {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}",
         "num_slots: 5, but the layers have 4"),
        ("a: [1, 2", "neither JSON nor YAML"),
        ("!!python/object/apply:os.getcwd []", "neither JSON nor YAML"),
    ],
)  # fmt: skip
def test_wrong_yaml_is_refused_by_key_and_what_was_expected(
    text: str, fault_: str, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(FormatError, match=fault_):
        read_initial(str(file), SHAPE)


@pytest.mark.parametrize("head", [b"", b"PK\x03\x04"])
def test_a_pickle_is_not_read(head: bytes, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_bytes(head + pickle.dumps({"logical_count": [[1]]}, protocol=4))
    with pytest.raises(FormatError, match="is a pickle"):
        read_initial(str(file), SHAPE)


def test_a_file_that_is_not_there_is_named_with_what_else_could_be_given(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no-such.json: cannot be read .* trivial"):
        read_initial(str(tmp_path / "no-such.json"), SHAPE)
    with pytest.raises(FormatError, match="cannot be read"):
        read_initial(str(tmp_path), SHAPE)
    with pytest.raises(FormatError, match="no file name"):
        read_initial("a\0b", SHAPE)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@example(b"{" * 100_000)
@example(b'{"logical_count": ' + b"[" * 100_000)
@example(b"[" * 400)
@example(b"? " * 500)
@example(b"a: &a [*a]\ninitial_global_assignments: {1: *a, 2: *a}")
@example(b"\xff\xfe\x00")
def test_any_bytes_are_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, body: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    path.write_bytes(body)
    with pytest.raises(FormatError):
        read_initial(str(path), SHAPE)
