"""Chooses a server's options for a workload, each with the reason that the plan shows.

Pure: the workload, what the memory holds and how fast the accelerator is are all that counts.
The rule for max-num-batched-tokens was found on one H200 (docs/workloads.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8fleet import catalog
from fp8fleet.capacity import Capacity
from fp8fleet.errors import OperatorError
from fp8fleet.lengths import Lengths
from fp8fleet.speed import Pace, Work, pace_of

MODEL_LEN = "max-model-len"
SEQUENCES = "max-num-seqs"
BUDGET = "max-num-batched-tokens"
CACHE = "kv-cache-dtype"
TENSOR_PARALLEL = "tensor-parallel-size"
SERVERS = "servers"

FIXED = "set in the inventory"
"""The reason of what the operator chose."""

_LEN_STEP = 256
_SEQUENCES_STEP = 8
_BUDGET_STEP = 512


@dataclass(frozen=True)
class Workload:
    """What a host's servers shall do."""

    lengths: Lengths
    concurrency: int
    """Streams at once over the host."""
    goal_ms: float | None
    """For the 99th percentile of the time between two tokens of a stream."""


@dataclass(frozen=True)
class Choice:
    """A value and why it is that."""

    option: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Server:
    """What a server runs on."""

    accelerator: str
    release: str
    """Version of vLLM."""
    tensor_parallel: int
    context: int | None
    """Of the model, in tokens; None: config.json does not say."""
    fp8_cache: bool
    """Whether the accelerator can have the KV cache in FP8."""
    capacity: Callable[[Mapping[str, Any]], Capacity | None]
    """What the memory holds with these options; None: not known."""
    work: Work | None
    """None: not known."""
    fixed: Mapping[str, Any]
    """Options that the operator has set."""


@dataclass(frozen=True)
class Chosen:
    """The options of one server."""

    choices: tuple[Choice, ...]
    options: Mapping[str, Any]
    """Those that differ from vLLM's own defaults."""
    warnings: tuple[str, ...]
    holds: bool
    """Whether the KV cache holds all streams at once, as far as is known."""
    meets: bool
    """Whether the latency goal is within reach, as far as is known."""
    reached_ms: float | None
    """About the time between two tokens that 99 % keep; None: not computed."""


class DoesNotFit(OperatorError):
    """The longest request does not fit a server of some size; the text is the sum."""


@dataclass(frozen=True)
class Layout:
    """The servers of a host."""

    servers: int
    tensor_parallel: int
    chosen: Chosen
    """Of each of them, ``servers`` and ``tensor-parallel-size`` included."""


def lay_out(
    workload: Workload, devices: int, sizes: Iterable[int], server_of: Callable[[int], Server]
) -> Layout:
    """Share a host's devices among servers: as many as fit, each as small as will do.

    Tensor parallelism buys latency, more servers buy throughput: on two H200, two servers made
    7,545 output tokens/s at 2 x 16 streams, one over both 4,427 at 16.

    Args:
        sizes: tensor-parallel sizes that the model allows.
        server_of: the server of a size.

    Raises:
        OperatorError: no size fits.
    """
    layouts: list[Layout] = []
    refusal = OperatorError(f"no tensor-parallel size of the model fits {devices} devices")
    for size in sorted(size for size in sizes if size <= devices):
        servers = devices // size
        try:
            chosen = choose(workload, server_of(size), servers)
        except DoesNotFit as error:
            refusal = OperatorError(
                f"{error}, and the host has {devices} devices: share one server among several hosts"
                " (group: docs/servers.md), take a smaller or quantized checkpoint, or lower the"
                " lengths"
            )
        else:
            layouts.append(Layout(servers, size, chosen))
    if not layouts:
        raise refusal
    return _told(layouts, devices, workload.goal_ms)


def _best(layouts: list[Layout]) -> Layout:
    """The smallest that holds all streams and meets the goal; of these, holding comes first.

    Where none meets the goal, the one that comes nearest to it.
    """

    def rank(one: Layout) -> tuple[bool, bool, float, int]:
        chosen = one.chosen
        missed = 0.0 if chosen.meets else round(chosen.reached_ms or 0)
        return chosen.holds, chosen.meets, -missed, -one.tensor_parallel

    return max(layouts, key=rank)


def _told(layouts: list[Layout], devices: int, goal: float | None) -> Layout:
    """The best with its reasons."""
    best = _best(layouts)
    servers = f"{devices} devices, {best.tensor_parallel} for each"
    if idle := devices % best.tensor_parallel:
        servers += f"; {idle} stay idle"
    choices = (
        Choice(SERVERS, best.servers, servers),
        Choice(TENSOR_PARALLEL, best.tensor_parallel, _why_size(layouts, best)),
        *best.chosen.choices,
    )
    warnings = best.chosen.warnings
    others = [one for one in layouts if one.chosen.reached_ms and one is not best]
    if goal and others and not best.chosen.meets:
        reached = ", ".join(
            f"{one.tensor_parallel} about {one.chosen.reached_ms:.0f} ms"
            + " but not all streams" * (not one.chosen.holds)
            for one in others
        )
        warnings = (
            *warnings,
            f"no tensor-parallel size keeps {goal:g} ms: {best.tensor_parallel} comes nearest,"
            f" about {best.chosen.reached_ms:.0f} ms; others: {reached}",
        )
    chosen = replace(best.chosen, choices=choices, warnings=warnings)
    return replace(best, chosen=chosen)


def _why_size(layouts: list[Layout], best: Layout) -> str:
    """Why the best is not smaller: what the size just below lacks."""
    smaller = [one for one in layouts if one.tensor_parallel < best.tensor_parallel]
    if not smaller:
        return (
            "the smallest that fits: more servers buy throughput, tensor parallelism only latency"
        )
    below = smaller[-1]
    size, reached = below.tensor_parallel, below.chosen.reached_ms
    if best.chosen.holds and not below.chosen.holds:
        return f"{size} would fit, but not hold all streams at once"
    about = f" (about {reached:.0f} ms)" if reached else ""
    if best.chosen.meets:
        return f"{size} would fit, but miss the latency goal{about}"
    return f"nearest to the latency goal, which none reaches; {size} is further from it{about}"


def choose(workload: Workload, server: Server, servers: int) -> Chosen:
    """Choose the options of one of ``servers`` equal servers of a host.

    Raises:
        OperatorError: the workload's longest request is beyond the model or the memory.
    """
    streams = math.ceil(workload.concurrency / servers)
    draft = _Draft(workload, server, streams)
    for step in (_model_len, _cache, _sequences, _budget):
        step(draft)
    return Chosen(
        choices=tuple(draft.choices),
        options=draft.options,
        warnings=tuple(draft.warnings),
        holds=draft.holds,
        meets=draft.meets,
        reached_ms=draft.reached_ms,
    )


class _Draft:
    """What is chosen so far."""

    def __init__(self, workload: Workload, server: Server, streams: int) -> None:
        self.workload, self.server, self.streams = workload, server, streams
        self.choices: list[Choice] = []
        self.options: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.holds = self.meets = True
        self.reached_ms: float | None = None
        self.typical = math.ceil(workload.lengths.typical)

    def set(self, option: str, value: Any, reason: str, *, default: bool = False) -> None:
        """Choose a value; ``default``: it is vLLM's own and need not be written."""
        self.choices.append(Choice(option, value, reason))
        if not default:
            self.options[option] = value

    def is_fixed(self, option: str) -> bool:
        """Whether the operator chose; that is then the choice."""
        if option in self.server.fixed:
            self.choices.append(Choice(option, self.server.fixed[option], FIXED))
        return option in self.server.fixed

    def capacity(self) -> Capacity | None:
        """What the memory holds with what is chosen so far.

        max-num-seqs itself takes memory: until it is chosen, it is as many as all streams ask for
        or as the rest of the memory holds.
        """
        most = _up(self.streams, _SEQUENCES_STEP)
        capacity = self._capacity_with(most)
        if capacity is None or SEQUENCES in {**self.options, **self.server.fixed}:
            return capacity
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            found = self._capacity_with(middle)
            if found is not None and _held(found, self.typical) >= middle:
                low = middle
            else:
                high = middle - 1
        return self._capacity_with(low)

    def _capacity_with(self, sequences: int) -> Capacity | None:
        return self.server.capacity({SEQUENCES: sequences, **self.options, **self.server.fixed})


def _up(number: int, step: int) -> int:
    return math.ceil(number / step) * step


def _model_len(draft: _Draft) -> None:
    lengths, context = draft.workload.lengths, draft.server.context
    if context is not None and lengths.longest > context:
        raise OperatorError(
            f"the workload's longest request has {lengths.longest:,} tokens ({lengths.told}), the"
            f" model's context is {context:,}: lower workload_prompt_tokens, workload_output_tokens"
        )
    if draft.is_fixed(MODEL_LEN):
        fixed = draft.server.fixed[MODEL_LEN]
        if isinstance(fixed, int) and 0 < fixed < lengths.longest:
            draft.warnings.append(
                f"max-model-len {fixed} refuses the workload's longest request: {lengths.longest:,}"
                f" tokens ({lengths.told})"
            )
        return
    value = _up(lengths.longest, _LEN_STEP)
    reason = f"{lengths.told} = {lengths.longest:,} tokens, rounded up to a multiple of {_LEN_STEP}"
    if context is not None and value > context:
        value, reason = context, f"{lengths.told} = {lengths.longest:,} tokens; the model's context"
    draft.set(MODEL_LEN, value, reason)


def _cache(draft: _Draft) -> None:
    if draft.is_fixed(CACHE):
        return
    automatic = draft.capacity()
    if automatic is None:
        draft.set(CACHE, "auto", "what the memory holds is not known", default=True)
        return
    held = _held(automatic, draft.typical)
    asked = f"{draft.streams:,} streams of {draft.typical:,} tokens"
    if automatic.fits and held >= draft.streams:
        reason = f"the model's type: {automatic.tokens:,} tokens hold {asked}"
        draft.set(CACHE, "auto", reason, default=True)
        return
    why = f"the model's type would hold {held:,} of {asked}"
    if not automatic.fits:
        why = "the model's type would not hold the longest request"
    if draft.server.fp8_cache:
        slower = "FP8 holds twice the tokens and was 1 to 4 % slower, measured up to 512 tokens"
        draft.set(CACHE, "fp8", f"{why}; {slower} of context")
    else:
        reason = f"{why}, but FP8 needs compute capability 8.9"
        draft.set(CACHE, "auto", reason, default=True)


def _held(capacity: Capacity, tokens: int) -> int:
    return max(math.floor(capacity.sequences(tokens)), 0) if capacity.kv_bytes > 0 else 0


def _sequences(draft: _Draft) -> None:
    capacity = draft.capacity()
    if capacity is not None and not capacity.fits:
        raise DoesNotFit(
            f"the workload's longest request ({draft.workload.lengths.longest:,} tokens,"
            f" {draft.workload.lengths.told}) does not fit a server of tensor-parallel size"
            f" {draft.server.tensor_parallel}: {capacity.shortage()}"
        )
    typical = f"sequences of {draft.typical:,} tokens"
    held = _held(capacity, draft.typical) if capacity else None
    draft.holds = held is None or held >= draft.streams
    if draft.is_fixed(SEQUENCES):
        fixed = draft.server.fixed[SEQUENCES]
        if isinstance(fixed, int) and fixed < draft.streams:
            draft.warnings.append(
                f"max-num-seqs {fixed}: {draft.streams - fixed:,} of {draft.streams:,} streams wait"
            )
        return
    rounded = _up(draft.streams, _SEQUENCES_STEP)
    reason = f"{draft.streams:,} streams a server, rounded up to a multiple of {_SEQUENCES_STEP}"
    if held is None:
        value, reason = rounded, f"{reason}; what the memory holds is not known"
    elif held >= draft.streams:
        value, reason = min(rounded, held), f"{reason}; the memory holds {held:,} {typical}"
    else:
        value, reason = max(held, 1), f"the memory holds {held:,} {typical}"
        draft.warnings.append(
            f"max-num-seqs {value}: the memory holds {held:,} {typical}, so that"
            f" {draft.streams - value:,} of {draft.streams:,} streams wait: more devices, a shorter"
            " workload or a lower workload_concurrency would end that"
        )
    budget = draft.server.fixed.get(BUDGET)
    if isinstance(budget, int) and 0 < budget < value:
        value, reason = budget, f"{BUDGET}, {FIXED}, allows no more"
    draft.set(SEQUENCES, value, reason)


def _budget(draft: _Draft) -> None:
    default = catalog.accelerators()[draft.server.accelerator].batched_tokens
    goal, base = draft.workload.goal_ms, catalog.measured_speed()
    pace = _pace(draft) if goal is not None else None
    if draft.is_fixed(BUDGET):
        if goal is not None and pace is not None:
            _hold_against(draft, draft.server.fixed[BUDGET], goal, pace)
        return
    if goal is None:
        _keep_default(draft, default, "no workload_latency_goal_ms")
        return
    if draft.workload.lengths.prompt_p95 <= base.short_prompt:
        reason = f"95 % of the prompts have at most {base.short_prompt:,} tokens: less did not help"
        _keep_default(draft, default, reason)
        if pace is not None and pace.step_ms > goal:
            draft.reached_ms, draft.meets = pace.step_ms, False
            draft.warnings.append(
                f"workload_latency_goal_ms = {goal:g} is out of reach: a decode step alone takes"
                f" about {pace.step_ms:.0f} ms: raise the goal or lower workload_concurrency"
            )
        return
    if pace is None:
        _keep_default(draft, default, "how fast it is is not known")
        draft.warnings.append(
            f"workload_latency_goal_ms = {goal:g} sets nothing: the speed of"
            f" {draft.server.accelerator} with this model is not known"
        )
        return
    _keep_goal(draft, default, goal, pace)


def _hold_against(draft: _Draft, fixed: Any, goal: float, pace: Pace) -> None:
    """Say where the operator's own budget is above what the rule would choose for the goal."""
    rate = catalog.measured_speed().budget_share * pace.prefill_tokens_per_s
    reached = pace.step_ms + fixed / rate * 1000 if type(fixed) is int else 0.0
    if reached > goal:
        draft.warnings.append(
            f"max-num-batched-tokens {fixed}, {FIXED}, may miss workload_latency_goal_ms ="
            f" {goal:g}: the plan's rule counts about {reached:.0f} ms"
        )


def _keep_default(draft: _Draft, default: int, why: str) -> None:
    sequences = _asked_sequences(draft)
    if sequences > default:
        value = _up(sequences, _BUDGET_STEP)
        draft.set(BUDGET, value, "vLLM wants at least max-num-seqs")
    else:
        draft.set(BUDGET, default, f"vLLM's default: {why}", default=True)


def _asked_sequences(draft: _Draft) -> int:
    value = {**draft.options, **draft.server.fixed}.get(SEQUENCES, 0)
    return value if isinstance(value, int) else 0


def _pace(draft: _Draft) -> Pace | None:
    """Speeds with all streams decoding at the typical length while a long prompt comes in."""
    capacity = draft.capacity()
    if draft.server.work is None or capacity is None:
        return None
    running = min(draft.streams, _asked_sequences(draft) or draft.streams)
    sequence_bytes = capacity.kv_bytes / max(capacity.sequences(draft.typical), 1e-9)
    return pace_of(
        draft.server.work,
        draft.server.accelerator,
        draft.server.release,
        draft.server.tensor_parallel,
        draft.workload.lengths.prompt_p95,
        running * sequence_bytes,
    )


def _keep_goal(draft: _Draft, default: int, goal: float, pace: Pace) -> None:
    """As many prompt tokens a step as fit between two tokens, less a share for what varies."""
    base = catalog.measured_speed()
    rate = base.budget_share * pace.prefill_tokens_per_s
    tokens = (goal - pace.step_ms) / 1000 * rate
    told = (
        f"{base.budget_share:g} x ({goal:g} ms - {pace.step_ms:.1f} ms a decode step) x"
        f" {pace.prefill_tokens_per_s:,.0f} prompt tokens/s = {max(tokens, 0):,.0f}"
        f" ({pace.told()})"
    )
    value = math.floor(tokens / _BUDGET_STEP) * _BUDGET_STEP
    if value >= default:
        draft.reached_ms = pace.step_ms + default / rate * 1000
        _keep_default(draft, default, f"more would keep the goal: {told}")
        return
    # between the two nothing was fast in proportion: other hardware is trusted no more
    at_edge = value < base.confirmed_budget
    if at_edge:
        value = base.smallest_budget
    sequences = _asked_sequences(draft)
    if value < sequences:
        value, told = _up(sequences, _BUDGET_STEP), f"{told}; vLLM wants at least max-num-seqs"
    draft.reached_ms = pace.step_ms + value / rate * 1000
    draft.meets = draft.reached_ms <= goal
    if at_edge or not draft.meets:
        proven = pace.measured and value == base.smallest_budget
        draft.warnings.append(_edge(goal, value, draft.reached_ms, proven))
    draft.set(BUDGET, value, told)


def _edge(goal: float, value: int, reached: float, proven: bool) -> str:
    if reached > goal:
        return (
            f"workload_latency_goal_ms = {goal:g} is out of reach: about {reached:.0f} ms even with"
            f" max-num-batched-tokens {value}: raise the goal or lower workload_concurrency"
        )
    keeps = "keeps it" if proven else "is expected to keep it (estimate)"
    return (
        f"workload_latency_goal_ms = {goal:g} is at the edge: max-num-batched-tokens {value}"
        f" {keeps}, at the price of throughput (on an H200 a tenth) and of seconds until the first"
        " token when all streams have long prompts: a higher goal is cheaper"
    )
