"""Link matrices read, and the devices of servers chosen by them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fleets import refusal
from matrices import (
    ASCEND,
    ASCEND_DIES,
    BRIDGED,
    CPUS,
    CROSSED,
    LEGEND,
    NVSWITCH,
    OLD,
    P2P,
    PCIE,
    ROCM,
    WITH_NICS,
    graph,
    matrix,
    near,
    pairs_link,
)
from probes import RECORDED

from fp8fleet.topology import (
    Asked,
    Chosen,
    Topology,
    declared_topology,
    is_direct,
    load_topology,
    numbers_of,
    numbers_text,
    parse_topology,
    place,
    speed_of,
)


def chosen(topology: Topology | str, *asked: int | Asked) -> tuple[Chosen, ...]:
    """The choice for servers given by their sizes, tensor parallel over all of them."""
    graph_of = parse_topology(topology) if isinstance(topology, str) else topology
    return place(graph_of, tuple(Asked(a, a) if isinstance(a, int) else a for a in asked))


def devices(topology: Topology | str, *asked: int | Asked) -> list[tuple[int, ...]]:
    return [choice.devices for choice in chosen(topology, *asked)]


# Reading


def test_bridged_pairs_with_their_cpus_and_nodes() -> None:
    topology = parse_topology(BRIDGED)
    assert topology.tool == "nvidia-smi topo -m"
    assert topology.links[0] == ("X", "NV12", "SYS", "SYS")
    assert [device.cpus for device in topology.devices] == [CPUS[0], CPUS[0], CPUS[1], CPUS[1]]
    assert [device.numa for device in topology.devices] == [(0,), (0,), (1,), (1,)]


def test_the_answer_of_a_real_pair_of_h200() -> None:
    text = (RECORDED / "gpu/h200-x2.txt").read_text().partition("@topology\n")[2]
    topology = parse_topology("\n".join(line[1:] for line in text.splitlines()))
    assert topology.links == (("X", "NV18"), ("NV18", "X"))
    assert [(d.cpus, d.numa) for d in topology.devices] == [("0-31", (0,))] * 2


def test_colours_in_the_header_say_nothing() -> None:
    plain = NVSWITCH.replace("\x1b[4m", "").replace("\x1b[0m", "")
    without_escape = NVSWITCH.replace("\x1b", "")
    assert parse_topology(NVSWITCH) == parse_topology(plain) == parse_topology(without_escape)
    assert {link for row in parse_topology(NVSWITCH).links for link in row} == {"X", "NV18"}


def test_fused_cells_and_network_cards_are_passed_over() -> None:
    topology = parse_topology(WITH_NICS)
    assert topology.links == (("X", "NV6"), ("NV6", "X"))
    assert [device.numa for device in topology.devices] == [(0,), (1,)]
    assert [device.cpus for device in topology.devices] == ["0-23", "24-47"]


def test_fused_links_of_devices_are_told_apart() -> None:
    text = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X NV12PIX\nGPU1\tNV12 X SYS\nGPU2\tPIXSYS X \n"
    assert parse_topology(text).links[0] == ("X", "NV12", "PIX")


def test_spaces_for_tabs_and_cards_by_their_names() -> None:
    topology = parse_topology(OLD)
    assert topology.links == (("X", "NV6"), ("NV6", "X"))
    assert [(d.cpus, d.numa) for d in topology.devices] == [("0-23,48-71", ())] * 2
    spaced = BRIDGED.replace("\t\t", "\t").expandtabs(8)
    assert parse_topology(spaced) == parse_topology(BRIDGED)


@pytest.mark.parametrize("affinity", ["", "\t\t\t", "\t\t\tN/A", "N/A\tN/A\t\tN/A"])
def test_empty_affinities_are_not_known(affinity: str) -> None:
    topology = parse_topology(matrix(2, pairs_link, [affinity, affinity]))
    assert [(d.cpus, d.numa, d.place) for d in topology.devices] == [("", (), None)] * 2


def test_an_affinity_to_several_nodes_names_them_all() -> None:
    topology = parse_topology(matrix(1, pairs_link, ["0-127\t0-1\t\tN/A"]))
    assert topology.devices[0].numa == (0, 1)


def test_the_memory_of_a_gpu_that_is_a_node_itself_is_not_the_hosts() -> None:
    topology = parse_topology(matrix(1, pairs_link, ["0-71\t0\t\t4"]))
    assert topology.devices[0].numa == (0,)


def test_one_device_has_no_links() -> None:
    topology = parse_topology(matrix(1, pairs_link, [near(0)]))
    assert topology.links == (("X",),)
    assert topology.slowest((0,)) is None


def test_npus_with_hccs() -> None:
    topology = parse_topology(ASCEND)
    assert topology.tool == "npu-smi info -t topo"
    assert topology.links[2] == ("SYS", "SYS", "X", "HCCS")
    assert [device.cpus for device in topology.devices] == ["96-119", "96-119", "0-23", "0-23"]


def test_npus_with_two_dies_a_package() -> None:
    topology = parse_topology(ASCEND_DIES)
    assert topology.links[1] == ("SIO", "X", "HCCS_SW", "HCCS_SW")
    assert topology.devices[3].cpus == "40-79"


@pytest.mark.parametrize(
    "lines",
    [
        "MIG enabled: GPU1\n",
        "GPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n  MIG 3g.40gb     Device  1: (UUID: MIG-2)\n",
    ],
)
def test_lines_about_mig_mark_their_devices(lines: str) -> None:
    topology = parse_topology(BRIDGED + lines)
    assert [device.mig for device in topology.devices] == [False, True, False, False]


@pytest.mark.parametrize(
    ("line", "split"),
    [
        ("MIG enabled: GPU1 GPU3", [1, 3]),
        ("MIG enabled: GPU1, GPU3", [1, 3]),
        ("MIG Enabled: GPU 2", [2]),
        ("MIG enabled: 0 and 2", [0, 2]),
        ("MIG GPU2", [2]),
        ("MIG enabled: none", []),
        ("MIG enabled:", []),
        ("MIG M. : Disabled", []),
        ("MIG Mode: N/A", []),
    ],
)
def test_a_line_about_mig_splits_the_devices_that_it_names_and_no_other(
    line: str, split: list[int]
) -> None:
    devices = parse_topology(f"{BRIDGED}{line}\n").devices
    assert [index for index, device in enumerate(devices) if device.mig] == split


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("MIG enabled: GPU12", "GPU12 is split by MIG, and has the devices GPU0 to GPU3"),
        ("MIG enabled: 4", "GPU4 is split by MIG"),
        ("MIG M. : Enabled", "'MIG M. : Enabled' names no device: write `MIG enabled: GPU2"),
        ("MIG enabled", "names no device"),
        ("MIG enabled: the last one", "names no device"),
        ("MIG enabled: GPU" + "9" * 5000, "names no device"),
    ],
)
def test_a_line_about_mig_that_names_no_device_of_the_matrix_is_refused(
    line: str, told: str
) -> None:
    assert told in refusal(lambda: parse_topology(f"{BRIDGED}{line}\n"))


def test_links_are_ordered_from_the_fastest() -> None:
    order = ["NV18", "NV12", "NV4", "NV1", "SIO", "HCCS", "PIX", "PXB", "PHB", "NODE", "SYS"]
    assert sorted(order, key=speed_of, reverse=True) == order
    assert [link for link in order if is_direct(link)] == order[:6]


def test_lists_of_numbers_are_read_and_written() -> None:
    assert numbers_of("0-3,8") == {0, 1, 2, 3, 8}
    assert numbers_text([8, 3, 2, 1, 0, 3]) == "0-3,8"
    for odd in ("", "N/A", "0-99999999", "9000", "a-b", "-1", "0x3", "32-6"):
        assert numbers_of(odd) == set()


# Bad matrices


def cut(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[:lines])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (cut(BRIDGED, 4), "is not square (3 rows, 4 columns of devices): GPU3 has a column"),
        (cut(BRIDGED, 1), "is not square (0 rows, 4 columns"),
        (cut(BRIDGED, 3) + "\nGPU2\tSYS\tSYS", "row GPU2 has 2 of 4 links: the matrix is cut off"),
        (cut(BRIDGED, 4) + "\nGPU3", "row GPU3 has no link"),
        (cut(BRIDGED, 3) + "\nGPU2\tSYS\tSY", "row GPU2 has 1 of 4 links, then 'SY'"),
        ("\n".join(BRIDGED.splitlines()[1:]), "row GPU0 stands before any header"),
        (BRIDGED.replace("\tGPU3", "", 1), "GPU3 has no column"),
        (BRIDGED.replace("GPU3\t", "GPU2\t"), "has two rows GPU2"),
        (BRIDGED + BRIDGED, "holds two matrices"),
        (BRIDGED + BRIDGED.splitlines()[1], "has two rows GPU0"),
        (BRIDGED.replace("GPU0\t X \tNV12", "GPU0\t X \tNV8"), "says NV8 from GPU0 to GPU1"),
        (BRIDGED.replace("GPU0\t X ", "GPU0\tSYS"), "says SYS from GPU0 to GPU0"),
        (BRIDGED.replace("GPU", "GPU1"), "expected GPU0, GPU1, ... in order"),
        (ROCM, "row GPU0 has 0 of 2 links, then '0': the matrix is cut off or another command's"),
        (P2P, "row GPU0 has 1 of 2 links, then 'OK'"),
        (LEGEND, "has no row of devices and begins with 'Legend:'"),
        ("Failed to run topology matrix", "holds an error message, 'Failed to run topology"),
        ("NVIDIA-SMI has failed because it couldn't communicate", "holds an error message"),
        ("Failed to initialize NVML: Driver/library version mismatch", "holds an error message"),
        ("sh: 1: nvidia-smi: not found", "holds an error message"),
        ("No devices were found", "holds an error message"),
        (
            "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05 |",
            "has no row of devices and begins",
        ),
        ("\x00\x01模型😀", "has no row of devices"),
        (
            cut(BRIDGED, 4) + "\nGPU3\tSYS\tSYS\tNV12\t X \t52-6",
            "row GPU3, the last line, has fewer",
        ),
        (cut(BRIDGED, 4) + "\nGPU3\tSYS\tSYS\tNV12\t X \n", "row GPU3, the last line, has fewer"),
        (
            BRIDGED.replace(CPUS[1], "52-6"),
            "row GPU2 has the CPU affinity '52-6', expected a list such as 0-31: the matrix is cut",
        ),
        (ASCEND.replace("0-23", "0-"), "row NPU2 has the CPU affinity '0-', expected a list"),
        (BRIDGED.replace("\t1\t\tN/A", "\tx\t\tN/A"), "has the NUMA affinity 'x'"),
    ],
)
def test_what_is_no_whole_matrix_is_refused_in_one_line(text: str, expected: str) -> None:
    assert expected in refusal(lambda: parse_topology(text))


@pytest.mark.parametrize("text", [BRIDGED, NVSWITCH, PCIE, ASCEND, ASCEND_DIES])
def test_every_cut_within_the_rows_of_a_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "matrix.txt"
    rows, _, legend = text.partition("\nLegend")
    rows = rows.rstrip("\n") + "\n"
    path.write_text(rows)
    assert load_topology(path) == parse_topology(text)
    for end in range(len(rows)):
        path.write_text(rows[:end])
        assert str(path) in refusal(lambda: load_topology(path))
    for end in range(len(legend)):
        path.write_text(f"{rows}\nLegend{legend[:end]}")
        assert load_topology(path) == parse_topology(text)


def test_a_whole_last_row_without_an_end_of_line_may_be_cut_within_its_cpus(tmp_path: Path) -> None:
    path = tmp_path / "matrix.txt"
    path.write_text(ASCEND.partition("\n\n")[0][:-3])
    assert refusal(lambda: load_topology(path)).endswith(
        "matrix.txt: ends within row NPU3, no end of line follows: the matrix is cut off, save the"
        " tool's output again"
    )


def test_files_that_hold_no_text_are_refused_by_their_name(tmp_path: Path) -> None:
    wide, large, gone = tmp_path / "wide", tmp_path / "large", tmp_path / "gone"
    wide.write_bytes(BRIDGED.encode("utf-16"))
    large.write_bytes(b" " * (1 << 20) + b"  ")
    for path, expected in (
        (wide, "not UTF-8 text"),
        (large, "larger than 1 MiB"),
        (gone, "No such file"),
        (tmp_path, "cannot be read"),
        (tmp_path / ("n" * 300), "cannot be read"),
    ):
        message = refusal(lambda path=path: load_topology(path))  # type: ignore[misc]
        assert message.startswith(f"{path}: ")
        assert expected in message


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "matrix.txt"
    path.write_text(BRIDGED, encoding="utf-8-sig")
    assert load_topology(path) == parse_topology(BRIDGED)


# Choosing


def test_servers_get_the_bridged_pairs() -> None:
    assert devices(BRIDGED, 2, 2) == [(0, 1), (2, 3)]
    assert devices(CROSSED, 2, 2) == [(0, 3), (1, 2)]
    assert devices(CROSSED, 2) == [(0, 3)]


def test_a_single_device_does_not_break_the_pair_that_another_server_needs() -> None:
    assert devices(BRIDGED, 1, 2) == [(0,), (2, 3)]
    lone = graph(3, lambda a, b: "NV12" if {a, b} == {0, 1} else "SYS")
    assert devices(lone, 1, 2) == [(2,), (0, 1)]


def test_a_fixed_member_of_one_pair_leaves_the_other_pair_to_the_server_of_two() -> None:
    assert devices(BRIDGED, Asked(1, 1, (1,)), 2) == [(1,), (2, 3)]
    assert devices(BRIDGED, Asked(1, 1, (2,)), 2, 1) == [(2,), (0, 1), (3,)]


def test_large_and_small_servers_share_a_switch_board_by_nodes() -> None:
    assert devices(NVSWITCH, 4, 2, 2) == [(0, 1, 2, 3), (4, 5), (6, 7)]
    assert devices(NVSWITCH, 2, 2, 4) == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert devices(NVSWITCH, 8) == [tuple(range(8))]


def test_without_nvlink_the_nearest_cards_are_taken() -> None:
    assert devices(PCIE, 2, 2, 4) == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert devices(PCIE, 3, 3) == [(0, 1, 2), (4, 5, 6)]


def test_three_of_four_hold_a_pair_and_stay_in_a_node_where_they_can() -> None:
    assert devices(BRIDGED, 3) == [(0, 1, 2)]
    assert devices(PCIE, 3) == [(0, 1, 2)]
    nodes = graph(5, lambda a, b: "SYS", [0, 0, 1, 1, 1])
    assert devices(nodes, 3) == [(2, 3, 4)]


def test_a_greedy_first_choice_does_not_cost_the_second_server_its_link() -> None:
    """The fastest pair 1-2 taken first would leave 0 and 3, which are far from each other."""

    def link(a: int, b: int) -> str:
        return {(1, 2): "NV12", (0, 1): "NV4", (2, 3): "NV4"}.get((min(a, b), max(a, b)), "SYS")

    assert devices(graph(4, link), 2, 2) == [(0, 1), (2, 3)]
    assert devices(graph(4, link), 2) == [(1, 2)]


def test_more_nvlinks_are_faster_than_fewer() -> None:
    few = graph(4, lambda a, b: "NV4" if a // 2 == b // 2 == 0 else "NV12")
    assert devices(few, 2) == [(0, 2)]


def test_npus_are_placed_by_hccs_and_dies() -> None:
    assert devices(ASCEND, 2, 2) == [(0, 1), (2, 3)]
    assert devices(ASCEND_DIES, 2, 1, 1) == [(0, 1), (2,), (3,)]


def test_pairs_of_the_inventory_are_enough() -> None:
    topology = declared_topology(4, [(0, 2), (3, 1)])
    assert devices(topology, 2, 2) == [(0, 2), (1, 3)]
    assert chosen(topology, 2)[0].reason == "devices 0,2: linked"
    assert chosen(topology, 4)[0].reason == "devices 0,1,2,3: not linked"
    assert chosen(declared_topology(2, []), 2)[0].reason == "devices 0,1: links not known"


def test_tensor_parallel_groups_of_a_pipeline_stand_one_after_another() -> None:
    assert devices(CROSSED, Asked(4, 2)) == [(0, 3, 1, 2)]
    assert devices(PCIE, Asked(4, 2), Asked(4, 2)) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def bridged_over(a: int, b: int) -> str:
    """NVLink between i and i + 4, a switch a four."""
    return "NV12" if abs(a - b) == 4 else "PIX" if a // 4 == b // 4 else "SYS"


def test_the_groups_of_a_pipeline_get_the_fast_links_before_the_whole_of_it_does() -> None:
    board = graph(8, bridged_over, [i // 4 for i in range(8)])
    assert devices(board, Asked(4, 2)) == [(0, 4, 1, 5)]
    assert devices(board, Asked(4, 2), Asked(4, 2)) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert devices(board, Asked(4, 1)) == [(0, 1, 2, 3)]
    # a group of four has PIX at best: so it gets that first
    assert devices(board, Asked(4, 2), Asked(4, 4)) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_listed_groups_that_cross_a_slow_link_are_told_of_where_faster_ones_are_free() -> None:
    board = graph(8, bridged_over)
    for listed in ((0, 1, 2, 3), (0, 1, 4, 5)):
        (choice,) = chosen(board, Asked(4, 2, listed))
        assert choice.devices == listed
        assert choice.faster
    (choice,) = chosen(board, Asked(4, 2, (7, 3, 2, 6)))
    assert choice.faster is None


def test_the_reason_names_slowest_link_and_nodes() -> None:
    assert [c.reason for c in chosen(BRIDGED, 2, 2)] == [
        "devices 0,1: NV12, NUMA node 0",
        "devices 2,3: NV12, NUMA node 1",
    ]
    assert chosen(BRIDGED, 4)[0].reason == "devices 0,1,2,3: SYS, NUMA nodes 0-1"
    assert chosen(BRIDGED, 1)[0].reason == "device 0: one device, no link, NUMA node 0"
    assert chosen(ASCEND, 2)[0].reason == "devices 0,1: HCCS"


def test_fixed_devices_are_kept_and_a_faster_free_set_is_named() -> None:
    (choice,) = chosen(BRIDGED, Asked(2, 2, (2, 1)))
    assert choice.devices == (2, 1)
    assert choice.faster == "devices 0,1: NV12, NUMA node 0"
    (choice,) = chosen(BRIDGED, Asked(2, 2, (3, 2)))
    assert (choice.devices, choice.faster) == ((3, 2), None)


def test_fixed_devices_that_cost_others_their_links_are_told_with_the_better_sets() -> None:
    fixed, other = chosen(BRIDGED, Asked(2, 2, (1, 2), "a"), Asked(2, 2, name="b"))
    assert (fixed.devices, other.devices) == ((1, 2), (0, 3))
    assert (fixed.faster, other.better) == (None, None)
    assert fixed.better == "a devices 0,1: NV12, NUMA node 0; b devices 2,3: NV12, NUMA node 1"


@pytest.mark.parametrize(
    "asked",
    [
        (Asked(2, 2, (2, 3)), Asked(2, 2)),
        (Asked(2, 2, (1, 2)), Asked(1, 1, (1,)), Asked(2, 2)),
        (Asked(3, 3, (0, 1, 2)), Asked(1, 1)),
        (Asked(3, 2, (0, 1, 2)),),  # a part of a server over hosts
    ],
)
def test_no_better_sets_are_told_where_there_are_none(asked: tuple[Asked, ...]) -> None:
    assert [choice.better for choice in chosen(BRIDGED, *asked)] == [None] * len(asked)


def test_groups_of_a_pipeline_across_the_slow_links_are_told() -> None:
    (choice,) = chosen(BRIDGED, Asked(4, 2, (0, 2, 1, 3)))
    assert choice.reason == "devices 0,2 and 1,3: SYS, NUMA nodes 0-1"
    assert choice.better == "devices 0,1 and 2,3: NV12; between them SYS, NUMA nodes 0-1"
    assert chosen(BRIDGED, Asked(4, 2, (2, 3, 0, 1)))[0].better is None


def test_a_pipeline_tells_the_links_within_its_groups_and_between_them() -> None:
    (choice,) = chosen(BRIDGED, Asked(4, 2))
    assert choice.reason == "devices 0,1 and 2,3: NV12; between them SYS, NUMA nodes 0-1"
    assert chosen(NVSWITCH, Asked(4, 2))[0].reason == "devices 0,1 and 2,3: NV18, NUMA node 0"
    assert chosen(BRIDGED, Asked(4, 1))[0].reason == "devices 0,1,2,3: SYS, NUMA nodes 0-1"


def test_a_faster_set_that_others_hold_is_not_free() -> None:
    first, second, third = chosen(
        BRIDGED, Asked(2, 2, (1, 2)), Asked(1, 1, (0,)), Asked(1, 1, (3,))
    )
    assert (first.faster, second.faster, third.faster) == (None, None, None)


def test_two_servers_may_be_fixed_on_one_device() -> None:
    assert devices(BRIDGED, Asked(1, 1, (0,)), Asked(1, 1, (0,)), 2) == [(0,), (0,), (2, 3)]


def test_devices_that_mig_splits_are_passed_over_and_refused_where_fixed() -> None:
    text = BRIDGED + "MIG enabled: GPU0\n"
    assert devices(text, 2, 1) == [(2, 3), (1,)]
    assert "device 0 is split by MIG" in refusal(lambda: chosen(text, Asked(1, 1, (0,))))
    told = "3 of 4 devices are left (split by MIG and not used: 0)"
    assert told in refusal(lambda: chosen(text, 4))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((3, 2), "the servers without devices need 5, and 4 of 4 devices are left"),
        ((Asked(2, 2, (0, 1)), 3), "need 3, and 2 of 4"),
        ((Asked(1, 1, (4,)),), "device 4 is not one of the 4 (0-3)"),
        ((Asked(1, 1, (10**30,)),), "is not one of the 4"),
        ((10**30,), "use fewer servers or smaller ones"),
    ],
)
def test_devices_that_do_not_suffice_are_refused(
    asked: tuple[int | Asked, ...], expected: str
) -> None:
    assert expected in refusal(lambda: chosen(BRIDGED, *asked))


def test_sets_of_more_than_sixteen_devices_are_not_searched_but_fixed_ones_are_kept() -> None:
    many = graph(17, pairs_link)
    assert "at most 16" in refusal(lambda: chosen(many, 2))
    assert devices(many, Asked(2, 2, (15, 16))) == [(15, 16)]


def test_sixteen_devices_are_searched() -> None:
    board = graph(16, lambda a, b: "SIO" if a // 2 == b // 2 else "HCCS_SW")
    assert devices(board, *[2] * 8) == [(i, i + 1) for i in range(0, 16, 2)]
    assert devices(board, 4, 4, 4, 4) == [tuple(range(i, i + 4)) for i in range(0, 16, 4)]


LINKS = ["NV12", "NV4", "PIX", "PHB", "NODE", "SYS"]


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_as_good_as_the_best_of_all(seed: int) -> None:
    """Against every possible choice, on small graphs with any links."""
    dice = random.Random(seed)
    count = dice.randint(2, 6)
    pairs = {pair: dice.choice(LINKS) for pair in itertools.combinations(range(count), 2)}
    topology = graph(
        count,
        lambda a, b: pairs[min(a, b), max(a, b)],
        [dice.randint(0, 1) for _ in range(count)],
    )
    sizes = [dice.randint(1, 4)]
    while dice.random() < 0.7 and sum(sizes) < count:
        sizes.append(dice.randint(1, count - sum(sizes)))
    sizes = [size for size in sizes if size <= count]
    groups = [dice.choice([g for g in range(1, size + 1) if size % g == 0]) for size in sizes]
    asked = [Asked(size, group) for size, group in zip(sizes, groups, strict=True)]
    found = devices(topology, *asked)
    assert [len(held) for held in found] == sizes
    held = list(itertools.chain.from_iterable(found))
    assert len(set(held)) == len(held)
    assert _value(topology, found, groups) == max(
        _value(topology, sets, groups) for sets in _all_choices(range(count), sizes)
    )
    assert found == devices(topology, *asked)


def _value(
    topology: Topology, sets: Sequence[Sequence[int]], sizes: Sequence[int]
) -> tuple[list[int], list[int], int, int]:
    """As the documentation has it; a set is in its best groups."""
    groups, slowest, nodes, total = [], [], 0, 0
    for held, size in zip(sets, sizes, strict=True):
        groups += max(
            sorted(_slowest(topology, order[i : i + size]) for i in range(0, len(held), size))
            for order in itertools.permutations(held)
        )
        slowest.append(_slowest(topology, held))
        nodes -= len({topology.devices[i].numa for i in held})
        total += sum(speed_of(topology.links[a][b]) for a, b in itertools.combinations(held, 2))
    return sorted(groups), sorted(slowest), nodes, total


def _slowest(topology: Topology, held: Sequence[int]) -> int:
    pairs = itertools.combinations(held, 2)
    return min((speed_of(topology.links[a][b]) for a, b in pairs), default=10**9)


def _all_choices(free: Sequence[int], sizes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    if not sizes:
        yield []
        return
    for held in itertools.combinations(free, sizes[0]):
        for rest in _all_choices([i for i in free if i not in held], sizes[1:]):
            yield [held, *rest]
