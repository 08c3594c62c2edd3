"""The links between a host's devices: reads the matrix of the vendor's tool, chooses device sets.

Pure: the matrix is text, the choice depends on nothing else. Formats: the legend that
`nvidia-smi topo -m` prints under its matrix, and that of `npu-smi info -t topo`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import OperatorError

LINKED, UNLINKED, UNKNOWN = "linked", "not linked", "links not known"
"""Links without a matrix: what the inventory's pairs say, and what nothing says."""

_SPEED = {
    "SIO": 90,  # two dies in one package
    "HCCS": 80,
    "HCCS_SW": 80,  # HCCS through its switch
    "UB": 80,
    LINKED: 80,
    "PIX": 50,
    "PXB": 40,
    "PIB": 40,  # reserved, says Huawei's aclrtGetDevicesTopo
    "PHB": 30,
    "NODE": 20,
    "SYS": 10,
    UNLINKED: 0,
    UNKNOWN: 0,
    "NA": 0,
}
_NVLINK = 100
"""Any NVLink is faster than the others; more of them are faster than fewer."""
_NO_LINK = 10**6
"""Speed of a set of one device, which crosses nothing."""

_LINK = re.compile(r"NV\d{1,2}|HCCS_SW|HCCS|SIO|NODE|SYS|PHB|PXB|PIX|PIB|UB|X|NA")
_DEVICE = re.compile(r"(GPU|NPU|Phy-ID)(\d{1,3})")
_HEAD = re.compile(r"(GPU|NPU|Phy-ID|NIC)\d+|[a-z]\w*_\w+|CPU")
"""What follows the first device in a header: a device, a network card (NIC0, mlx5_0) or CPU."""
_COLOUR = re.compile(r"(?:\x1b|\^\[)?\[[0-9;]*m")
"""ANSI codes; copied from a terminal they may have lost their escape."""
_TOOLS = {"GPU": "nvidia-smi topo -m", "NPU": "npu-smi info -t topo"}
_ERROR = re.compile(
    r"failed|unable|couldn't|not found|no devices|mismatch|insufficient|error", re.IGNORECASE
)

MAX_DEVICES = 16
"""The search for sets is exact, so it has to be small; no host that is known has more."""
_MAX_CPU = 8192
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class TopologyDevice:
    """A device and what lies next to it."""

    cpus: str
    """Processors of its NUMA node, such as ``0-31``; empty: not told."""
    numa: tuple[int, ...]
    """NUMA nodes whose memory is next to it; empty: not told."""
    mig: bool = False
    """Whether it is split by MIG."""

    @property
    def place(self) -> object:
        """Equal for devices in one place of the host; None: not told."""
        return self.numa or self.cpus or None


@dataclass(frozen=True)
class Topology:
    """The devices of a host, by index, and the link of every pair."""

    tool: str
    """The command that printed the matrix; empty: from the inventory's keys."""
    devices: tuple[TopologyDevice, ...]
    links: tuple[tuple[str, ...], ...]
    """``NV12``, ``SYS``, ``HCCS``, ... by both indices; ``X`` on the diagonal."""

    @property
    def whole_devices(self) -> int:
        """How many are not split by MIG, so that servers can use them."""
        return sum(not device.mig for device in self.devices)

    def slowest(self, indices: Iterable[int]) -> str | None:
        """The slowest link in a set; None: a set of one device has none."""
        pairs = itertools.combinations(indices, 2)
        return min((self.links[a][b] for a, b in pairs), key=speed_of, default=None)


@dataclass(frozen=True)
class Asked:
    """The devices that a server asks for."""

    size: int
    group: int
    """Devices that exchange most (tensor parallel); ``size`` is a multiple of it."""
    devices: tuple[int, ...] = ()
    """Those that the operator has fixed; empty: to be chosen."""
    name: str = ""
    """Of the server, for messages."""


@dataclass(frozen=True)
class Chosen:
    """The devices of a server, groups one after another."""

    devices: tuple[int, ...]
    reason: str
    """One line, such as ``devices 2,3: NV12, NUMA node 1``."""
    faster: str | None = None
    """A faster set that is free, where the operator has fixed a slower one."""
    better: str | None = None
    """Sets of all servers, none slower and some faster than with the devices that are fixed."""


def speed_of(link: str) -> int:
    """A number for a link class, higher is faster; only the order means something."""
    if link.startswith("NV"):
        return _NVLINK + int(link[2:])
    return _SPEED[link]


def is_direct(link: str) -> bool:
    """Whether devices are linked past the PCI bus: NVLink, HCCS and the like."""
    return link != "X" and speed_of(link) >= _SPEED["HCCS"]


def plain_text(line: str) -> str:
    """A line without ANSI codes."""
    return _COLOUR.sub("", line)


def numbers_text(numbers: Iterable[int]) -> str:
    """Numbers as the kernel lists them: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def numbers_of(text: str) -> frozenset[int]:
    """The numbers of a list such as ``0-3,8``; none where it says something else (``N/A``, 8-3)."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None:
            return frozenset()
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= _MAX_CPU:
            return frozenset()
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


# Reading a matrix


def load_topology(path: Path) -> Topology:
    """Read a file that holds one matrix.

    Raises:
        OperatorError: the file is missing or is no whole matrix.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from None
    if len(content) > _MAX_BYTES:
        raise OperatorError(f"{path}: larger than 1 MiB: no matrix of links is")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise OperatorError(f"{path}: not UTF-8 text: save the tool's output again") from None
    try:
        topology = parse_topology(text)
    except OperatorError as error:
        raise OperatorError(f"{path}: {error}") from None
    last = plain_text(text.rpartition("\n")[2]).split()
    if last and _DEVICE.fullmatch(last[0]):
        raise OperatorError(
            f"{path}: ends within row {last[0]}, no end of line follows: the matrix is cut off,"
            " save the tool's output again"
        )
    return topology


def parse_topology(text: str) -> Topology:
    """Read the output of `nvidia-smi topo -m` or `npu-smi info -t topo`.

    The header may wear ANSI codes, cells may be fused (``PIXNODE``), affinities may be empty, tabs
    may have become spaces. Rows and columns of network cards are passed over. Devices that a line
    beginning with ``MIG`` names, or follows as in `nvidia-smi -L`, are split.

    Raises:
        OperatorError: it is no whole matrix; one line that says what it is.
    """
    header: list[str] | None = None
    rows: dict[str, tuple[tuple[str, ...], str]] = {}
    split: set[str] = set()
    last = end = ""
    for raw in text.splitlines():
        line = plain_text(raw).rstrip()
        words = line.split()
        end = words[0] if words else end
        if listed := re.match(r"\s*GPU (\d+): ", line):
            last = f"GPU{listed[1]}"
        elif words and words[0].startswith("MIG"):
            split.update(_split_by(line, last))
        elif not words or not _DEVICE.fullmatch(words[0]):
            continue
        elif len(words) == 1:
            raise OperatorError(f"row {words[0]} has no link: the matrix is cut off, save it again")
        elif _HEAD.fullmatch(words[1]):
            if header is not None:
                raise OperatorError("holds two matrices: keep one a file")
            header = _columns(line)
        elif header is None:
            raise OperatorError(
                f"row {words[0]} stands before any header: save all of the tool's output"
            )
        elif words[0] in rows:
            raise OperatorError(f"has two rows {words[0]}: keep one matrix a file")
        else:
            last = words[0]
            rows[last] = _row(line, header)
    if header is None:
        raise OperatorError(_no_matrix(text))
    columns = {name: _columns_of(after) for name, (_, after) in rows.items()}
    if columns.get(end, 0) < max(columns.values(), default=0) and end in rows:
        raise OperatorError(
            f"row {end}, the last line, has fewer columns than the others: the matrix is cut off,"
            " save the tool's output again"
        )
    return _topology(header, rows, split)


def _split_by(line: str, last: str) -> list[str]:
    """The devices that a line about MIG says are split.

    Args:
        last: the device of the line before, to which the slices of `nvidia-smi -L` belong.
    """
    if re.match(r"\s*MIG\s+\S+\s+Device\s+\d+:", line):
        return [last]
    _, colon, named = line.partition(":")
    named = named if colon else line.replace("MIG", "", 1)
    if re.fullmatch(r"(\W|and|GPU|\d{1,3}(?!\d))*", named) and re.search(r"\d", named):
        return [f"GPU{int(number)}" for number in re.findall(r"\d+", named)]
    if re.fullmatch(r"\s*(none|no|off|disabled|n/a|-)?\s*", named, re.IGNORECASE):
        return []
    raise OperatorError(
        f"line {line.strip()[:60]!r} names no device: write `MIG enabled: GPU2 GPU3`, or leave the"
        " line out where no device is split"
    )


def _no_matrix(text: str) -> str:
    lines = [plain_text(line).strip() for line in text.splitlines()]
    first = next((line for line in lines if line), "")
    expected = "save what `nvidia-smi topo -m` or `npu-smi info -t topo` prints"
    if not first:
        return f"is empty: {expected}"
    shown = repr(first if len(first) <= 60 else first[:57] + "...")
    if _ERROR.search(first):
        return f"holds an error message, {shown}: mend that on the host, then {expected}"
    return f"has no row of devices and begins with {shown}: {expected}"


def _columns(line: str) -> list[str]:
    """The columns of links that a header names."""
    return line.partition("CPU Affinity")[0].split()


def _row(line: str, header: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The links of a row, and the text of its affinities."""
    name, rest = line.split(maxsplit=1)
    cells: list[str] = []
    end = 0
    for match in _LINK.finditer(rest):
        if len(cells) == len(header) or rest[end : match.start()].strip():
            break
        cells.append(match[0])
        end = match.end()
    if len(cells) < len(header):
        then = rest[end:].split()
        found = f", then {then[0][:30]!r}" if then else ""
        raise OperatorError(
            f"row {name} has {len(cells)} of {len(header)} links{found}: the matrix is cut off or"
            " another command's; save the tool's output again"
        )
    return tuple(cells), rest[end:]


def _columns_of(after: str) -> int:
    return after.count("\t") if "\t" in after else len(after.split())


def _affinity(name: str, text: str) -> TopologyDevice:
    """CPUs and NUMA nodes. Columns end with tabs, one more after the nodes; copies have spaces."""
    columns = [c.strip() for c in text.split("\t")][1:] if "\t" in text else text.split()
    cpus, numa, *_ = [*columns, "", ""]
    for what, listed in (("CPU", cpus), ("NUMA", numa)):
        if listed not in ("", "N/A") and not numbers_of(listed):
            raise OperatorError(
                f"row {name} has the {what} affinity {listed[:30]!r}, expected a list such as 0-31:"
                " the matrix is cut off or damaged, save the tool's output again"
            )
    return TopologyDevice(numbers_text(numbers_of(cpus)), tuple(sorted(numbers_of(numa))))


def _topology(
    header: list[str],
    rows: dict[str, tuple[tuple[str, ...], str]],
    split: Collection[str],
) -> Topology:
    names = [name for name in header if _DEVICE.fullmatch(name)]
    missing = [name for name in names if name not in rows]
    strange = [name for name in rows if name not in names]
    if missing or strange:
        what = f"{missing[0]} has a column and no row" if missing else f"{strange[0]} has no column"
        raise OperatorError(
            f"is not square ({len(rows)} rows, {len(names)} columns of devices): {what}; the matrix"
            " is cut off, save the tool's output again"
        )
    unknown = [name for name in sorted(split) if name not in names]
    if unknown:
        raise OperatorError(
            f"says that {unknown[0] or 'a device'} is split by MIG, and has the devices"
            f" {names[0]} to {names[-1]}: correct the line that begins with MIG"
        )
    if names[0].startswith("GPU") and names != [f"GPU{i}" for i in range(len(names))]:
        raise OperatorError(
            f"has the devices {', '.join(names)}: expected GPU0, GPU1, ... in order"
        )
    columns = [header.index(name) for name in names]
    links = tuple(tuple(rows[name][0][column] for column in columns) for name in names)
    for a, b in itertools.product(range(len(names)), repeat=2):
        if (links[a][b] == "X") != (a == b) or links[a][b] != links[b][a]:
            raise OperatorError(
                f"says {links[a][b]} from {names[a]} to {names[b]} and {links[b][a]} back: columns"
                " are missing, save the tool's output again"
            )
    devices = (_affinity(name, rows[name][1]) for name in names)
    return Topology(
        _TOOLS["GPU" if names[0].startswith("GPU") else "NPU"],
        tuple(
            TopologyDevice(device.cpus, device.numa, name in split)
            for name, device in zip(names, devices, strict=True)
        ),
        links,
    )


def declared_topology(count: int, pairs: Iterable[tuple[int, int]]) -> Topology:
    """What is known without a matrix: how many devices, and which pairs are linked."""
    linked = {frozenset(pair) for pair in pairs}
    other = UNLINKED if linked else UNKNOWN

    def link(a: int, b: int) -> str:
        return "X" if a == b else LINKED if frozenset((a, b)) in linked else other

    links = tuple(tuple(link(a, b) for b in range(count)) for a in range(count))
    return Topology("", (TopologyDevice("", ()),) * count, links)


# Choosing sets


@functools.cache
def place(topology: Topology, asked: tuple[Asked, ...]) -> tuple[Chosen, ...]:
    """Choose the devices of every server: the best sets of all that are possible.

    In this order: the slowest link of the worst tensor-parallel group is as fast as possible, then
    that of the second worst and so on; the same of whole servers, of which a pipeline has several
    groups; servers cross as few NUMA nodes as possible; the links inside the sets are fast in sum;
    indices are low. So no group crosses a slower link while a faster set is free.

    Raises:
        OperatorError: the devices don't suffice, or a fixed one is split by MIG.
    """
    fixed = {index for ask in asked for index in ask.devices}
    _check(topology, asked)
    free = tuple(i for i, d in enumerate(topology.devices) if i not in fixed and not d.mig)
    kinds = tuple((ask.size, ask.group) for ask in asked if not ask.devices)
    needed = sum(size for size, _ in kinds)
    if needed > len(free):
        mig = numbers_text(i for i, device in enumerate(topology.devices) if device.mig)
        why = f" (split by MIG and not used: {mig})" if mig else ""
        raise OperatorError(
            f"the servers without devices need {needed}, and {len(free)} of"
            f" {len(topology.devices)} devices are left{why}: use fewer servers or smaller ones"
        )
    sets = _best_sets(topology, free, kinds)
    chosen = [
        ask.devices or _grouped(topology, sets[ask.size, ask.group].pop(0), ask.group)
        for ask in asked
    ]
    used = {index for devices in chosen for index in devices}
    unused = [index for index in free if index not in used]
    better = _better(topology, asked, chosen)
    return tuple(
        Chosen(
            devices,
            _reason(topology, devices, ask.group),
            _faster(topology, devices, ask.group, unused) if ask.devices else None,
            better if ask.devices else None,
        )
        for ask, devices in zip(asked, chosen, strict=True)
    )


def _better(
    topology: Topology, asked: Sequence[Asked], chosen: Sequence[tuple[int, ...]]
) -> str | None:
    """The sets without any fixed devices, where no server gets slower and one faster."""
    if not any(ask.devices for ask in asked) or not _can_be_freed(topology, asked):
        return None
    free = place(topology, tuple(dataclasses.replace(ask, devices=()) for ask in asked))
    now = [_speeds(topology, d, ask.group) for d, ask in zip(chosen, asked, strict=True)]
    then = [_speeds(topology, c.devices, ask.group) for c, ask in zip(free, asked, strict=True)]
    if now == then or any(a > b for a, b in zip(now, then, strict=True)):
        return None
    return "; ".join(
        f"{ask.name} {choice.reason}".strip() for ask, choice in zip(asked, free, strict=True)
    )


def _can_be_freed(topology: Topology, asked: Sequence[Asked]) -> bool:
    """Whether every server could have devices of its own that the plan chooses."""
    usable = sum(not device.mig for device in topology.devices)
    return (
        len(topology.devices) <= MAX_DEVICES
        and sum(ask.size for ask in asked) <= usable
        and all(ask.size == (len(ask.devices) or ask.size) for ask in asked)
        and all(ask.size % ask.group == 0 for ask in asked)
    )


def _speeds(topology: Topology, devices: tuple[int, ...], group: int) -> tuple[int, int]:
    """Of the slowest link within the tensor-parallel groups, and of the slowest of all."""
    groups = [devices[i : i + group] for i in range(0, len(devices), group)]
    within = min(_scores(topology, one)[0] for one in groups)
    return within, _scores(topology, devices)[0]


def _check(topology: Topology, asked: Sequence[Asked]) -> None:
    count = len(topology.devices)
    if count > MAX_DEVICES and not all(ask.devices for ask in asked):
        raise OperatorError(
            f"{count} devices: sets are chosen of at most {MAX_DEVICES}; list the servers' devices"
        )
    for ask in asked:
        server = f"{ask.name}: " if ask.name else ""
        for index in ask.devices:
            if index >= count:
                raise OperatorError(
                    f"{server}device {index} is not one of the {count} (0-{count - 1})"
                )
            if topology.devices[index].mig:
                raise OperatorError(
                    f"{server}device {index} is split by MIG and servers use whole devices: use"
                    f" another, or `nvidia-smi -i {index} -mig 0` and save the matrix again"
                )


def _scores(topology: Topology, devices: tuple[int, ...]) -> tuple[int, int, int]:
    """Of a set: the speed of its slowest link, minus the NUMA nodes crossed, the sum of speeds."""
    links = [topology.links[a][b] for a, b in itertools.combinations(devices, 2)]
    speeds = [speed_of(link) for link in links]
    places = {topology.devices[i].place for i in devices} - {None}
    return min(speeds, default=_NO_LINK), 1 - max(len(places), 1), sum(speeds)


def _group_speeds(topology: Topology) -> Callable[[tuple[int, ...], int], tuple[int, ...]]:
    """A function of a set and the size of its tensor-parallel groups.

    It returns the speeds of the groups' slowest links, sorted, for the best groups of all that are
    possible: the lowest device is in one of them, and what is left is divided the same way.
    """
    table = [
        [speed_of(link) if link != "X" else _NO_LINK for link in row] for row in topology.links
    ]

    @functools.cache
    def slowest(devices: tuple[int, ...]) -> int:
        return min(table[a][b] for a, b in itertools.combinations(devices, 2))

    @functools.cache
    def speeds(devices: tuple[int, ...], group: int) -> tuple[int, ...]:
        if group == 1:
            return (_NO_LINK,) * len(devices)
        if len(devices) == group:
            return (slowest(devices),)
        first, others = devices[0], devices[1:]
        return max(
            tuple(sorted((slowest((first, *more)), *speeds(rest, group))))
            for more in itertools.combinations(others, group - 1)
            for rest in [tuple(i for i in others if i not in more)]
        )

    return speeds


_Kind = tuple[int, int]
"""How many devices a server has, and how many of them are a tensor-parallel group."""
_Best = tuple[
    tuple[tuple[int, ...], tuple[int, ...], int, int], tuple[tuple[_Kind, tuple[int, ...]], ...]
]
"""The value of some sets (speeds of the slowest links of groups and of servers, both sorted; the
two sums), and the sets."""


def _best_sets(
    topology: Topology, free: tuple[int, ...], kinds: tuple[_Kind, ...]
) -> dict[_Kind, list[tuple[int, ...]]]:
    """The best sets of ``kinds`` out of ``free``, by kind, lowest devices first.

    The lowest free device is in one of the sets or in none; what is left is searched the same way.
    Comparing sorted speeds is safe part by part: the better of two rests stays the better one
    with any set added to both.
    """
    scores = functools.cache(lambda devices: _scores(topology, devices))
    group_speeds = _group_speeds(topology)

    @functools.cache
    def search(free: tuple[int, ...], kinds: tuple[_Kind, ...]) -> _Best | None:
        if sum(size for size, _ in kinds) > len(free):
            return None
        if not kinds:
            return ((), (), 0, 0), ()
        first, others = free[0], free[1:]
        best = search(others, kinds)
        for kind in dict.fromkeys(kinds):
            size, group = kind
            left = list(kinds)
            left.remove(kind)
            for more in itertools.combinations(others, size - 1):
                rest = search(tuple(i for i in others if i not in more), tuple(left))
                if rest is None:
                    continue
                devices = (first, *more)
                slowest, crossed, total = scores(devices)
                (groups, servers, all_crossed, all_total), sets = rest
                value = (
                    tuple(sorted((*groups, *group_speeds(devices, group)))),
                    tuple(sorted((*servers, slowest))),
                    all_crossed + crossed,
                    all_total + total,
                )
                low = best is not None and best[1][0][1][0] == first
                if best is None or value > best[0] or (value == best[0] and not low):
                    best = value, ((kind, devices), *sets)
        return best

    found = search(free, kinds)
    assert found  # the caller counted
    by_kind: dict[_Kind, list[tuple[int, ...]]] = {}
    for kind, devices in sorted(found[1], key=lambda one: one[1]):
        by_kind.setdefault(kind, []).append(devices)
    return by_kind


def _grouped(topology: Topology, devices: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The order in which vLLM counts ranks: tensor-parallel groups one after another."""
    kind = (group, group)
    groups = _best_sets(topology, devices, (kind,) * (len(devices) // group))
    return tuple(itertools.chain.from_iterable(groups[kind]))


def _faster(
    topology: Topology, devices: tuple[int, ...], group: int, unused: Iterable[int]
) -> str | None:
    """A set as large with faster slowest links, of the unused devices and the server's own."""
    candidates = tuple(sorted({*devices, *unused}))
    if len(candidates) > MAX_DEVICES:
        return None
    if len(devices) % group:
        group = len(devices)  # a part of a server over hosts, whose groups go beyond this one
    group_speeds = _group_speeds(topology)

    def value(found: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return group_speeds(found, group), _scores(topology, found)

    best = max(itertools.combinations(candidates, len(devices)), key=value)
    listed = (devices[i : i + group] for i in range(0, len(devices), group))
    now = tuple(sorted(_scores(topology, one)[0] for one in listed)), _scores(topology, devices)
    if (value(best)[0], value(best)[1][0]) <= (now[0], now[1][0]):
        return None
    return _reason(topology, _grouped(topology, best, group), group)


def _reason(topology: Topology, devices: Sequence[int], group: int) -> str:
    return ", ".join(_said(topology, devices, group))


def _said(topology: Topology, devices: Sequence[int], group: int) -> Iterator[str]:
    slowest = topology.slowest(devices)
    if 1 < group < len(devices):
        groups = [devices[i : i + group] for i in range(0, len(devices), group)]
        listed = " and ".join(",".join(map(str, one)) for one in groups)
        within = min(filter(None, map(topology.slowest, groups)), key=speed_of)
        between = f"; between them {slowest}" if slowest != within else ""
        yield f"devices {listed}: {within}{between}"
    else:
        listed = ",".join(map(str, devices))
        s = "s" if len(devices) > 1 else ""
        yield f"device{s} {listed}: {slowest or 'one device, no link'}"
    nodes = sorted({node for index in devices for node in topology.devices[index].numa})
    if nodes:
        yield f"NUMA node{'s' if len(nodes) > 1 else ''} {numbers_text(nodes)}"
