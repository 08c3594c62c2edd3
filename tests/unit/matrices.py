"""Link matrices in the forms that the vendors' tools print; the numbers are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8fleet.topology import Topology, TopologyDevice

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""

CPUS = ("0-51,104-155", "52-103,156-207")
"""Of two NUMA nodes."""


def matrix(
    count: int,
    link: Callable[[int, int], str],
    affinities: Sequence[str] = (),
    *,
    name: str = "GPU",
    colour: bool = False,
) -> str:
    """What `nvidia-smi topo -m` prints, tabs and all."""
    columns = [f"{name}{i}" for i in range(count)]
    head = "\t" + "\t".join([*columns, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\t\x1b[4m{head[1:]}\x1b[0m" if colour else head]
    for a in range(count):
        cells = [" X " if a == b else link(a, b) for b in range(count)]
        affinity = affinities[a] if affinities else "\t\t\t"
        lines.append("\t".join([f"{name}{a}", *cells, affinity]))
    return "\n".join(lines) + "\n" + LEGEND


def near(node: int) -> str:
    """The affinity columns of a device of one of two nodes."""
    return f"{CPUS[node]}\t{node}\t\tN/A"


def pairs_link(a: int, b: int) -> str:
    """NVLink within the pairs 0-1, 2-3, ..."""
    return "NV12" if a // 2 == b // 2 else "SYS"


BRIDGED = matrix(4, pairs_link, [near(i // 2) for i in range(4)])
"""Four PCIe cards, bridged in pairs, a pair a node."""

CROSSED = matrix(4, lambda a, b: "NV12" if a + b == 3 else "SYS", [near(i % 2) for i in range(4)])
"""The same with the pairs 0-3 and 1-2."""

NVSWITCH = matrix(8, lambda a, b: "NV18", [near(i // 4) for i in range(8)], colour=True)
"""A board with NVSwitches: all to all, four devices a node."""

PCIE = matrix(
    8,
    lambda a, b: "PIX" if a // 2 == b // 2 else "NODE" if a // 4 == b // 4 else "SYS",
    [near(i // 4) for i in range(8)],
)
"""Eight cards without NVLink, two a switch."""

WITH_NICS = """\
	GPU0	GPU1	NIC0	NIC1	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	NV6	PIXNODE	0-23	0		N/A
GPU1	NV6	 X 	SYSSYS	24-47	1		N/A
NIC0	PIX	SYS	 X 	SYS
NIC1	NODE	SYS	SYS	 X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""
"""Fused cells, rows and columns of network cards."""

OLD = """\
        GPU0    GPU1    mlx5_0  mlx5_1  CPU Affinity
GPU0     X      NV6     PIX     SYS     0-23,48-71
GPU1    NV6      X      PXB     SYS     0-23,48-71
mlx5_0  PIX     PXB      X      SYS
mlx5_1  SYS     SYS     SYS      X
"""
"""An older tool's, copied from a terminal: spaces for tabs, cards by their names, no nodes."""

ASCEND = """\
           NPU0       NPU1       NPU2       NPU3       CPU Affinity
NPU0       X          HCCS       SYS        SYS        96-119
NPU1       HCCS       X          SYS        SYS        96-119
NPU2       SYS        SYS        X          HCCS       0-23
NPU3       SYS        SYS        HCCS       X          0-23

Legend:

  X    = Self
  HCCS = Connection traversing HCCS.
"""

ASCEND_DIES = """\
          Phy-ID0    Phy-ID1    Phy-ID2    Phy-ID3    CPU Affinity
Phy-ID0   X          SIO        HCCS_SW    HCCS_SW    0-39
Phy-ID1   SIO        X          HCCS_SW    HCCS_SW    0-39
Phy-ID2   HCCS_SW    HCCS_SW    X          SIO        40-79
Phy-ID3   HCCS_SW    HCCS_SW    SIO        X          40-79
"""
"""Two dies a package, all behind HCCS switches."""

ROCM = """\
============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1
GPU0   0            15
GPU1   15           0
"""

P2P = """\
	GPU0	GPU1
GPU0	X	OK
GPU1	OK	X
"""
"""`nvidia-smi topo -p2p r`."""


def graph(
    count: int, link: Callable[[int, int], str], nodes: Sequence[int] | None = None
) -> Topology:
    """A graph without a text."""
    links = tuple(tuple("X" if a == b else link(a, b) for b in range(count)) for a in range(count))
    devices = (TopologyDevice("", (nodes[i],) if nodes else ()) for i in range(count))
    return Topology("", tuple(devices), links)
