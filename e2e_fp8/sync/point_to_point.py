"""Weights from trainer ranks straight to engine ranks: each sends exactly the rectangles of the layout plan, and no rank gathers.

Trainer ranks come first in the process group, engine ranks after them. The rectangles of one (trainer, engine) pair are packed
into messages of bounded size in the plan's order, which both ends know, so nothing but bytes is sent. While a message is on its
way the next one is packed (or the last one unpacked): each rank allocates two message buffers and no more.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import LayoutError, UserError
from e2e_fp8.layout import EngineParallel
from e2e_fp8.layout.megatron import Spec
from e2e_fp8.layout.plan import Copy, Plan
from e2e_fp8.layout.tiles import TILE
from e2e_fp8.megatron_names import QKV_ORDER
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.rank_grid import RankGrid
from e2e_fp8.sync.buckets import ALIGNMENT
from e2e_fp8.sync.process_group import PairGroup
from e2e_fp8.sync.reshard import CARRIERS, Piece, check_parameters, fill_padding, outgoing, places


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What one rank moved."""

    num_bytes: int
    """Weights and scales, without alignment."""
    messages: int
    buffer_bytes: int
    """Memory that the transfer allocated on this rank."""


@dataclass(frozen=True, slots=True)
class Message:
    """Rectangles that travel together from one trainer rank to one engine rank."""

    copies: tuple[Copy, ...]
    extent: int
    """Bytes, alignment included."""


def transfer_plan(cfg: Config, trainer_ranks: int, spec: Spec) -> Plan:
    """The plan between ``trainer_ranks`` ranks of ``training.parallel`` and one engine of ``rollout.tensor_parallel`` ranks.

    ``spec`` is the ground's (``MegatronEngine.ground.spec``). Torch-free. Raises LayoutError or ConfigError for sizes that do not fit.
    """
    plan = QuantizationPlan.from_config(cfg)
    return Plan.from_config(
        to_hf_config(cfg.model, None),
        RankGrid.of(cfg.training.parallel, trainer_ranks).layout,
        EngineParallel(tensor=cfg.rollout.tensor_parallel, expert=cfg.rollout.expert_parallel),
        qkv_order=QKV_ORDER,
        spec=spec,
        fp8=lambda module: plan.training_fp8 and plan.is_fp8(module),
    )


def send(
    plan: Plan,
    rank: int,
    tensors: Sequence[Mapping[str, torch.Tensor]],
    scales: Sequence[Mapping[str, torch.Tensor]],
    group: PairGroup,
    *,
    device: torch.device,
    policy_version: int,
    max_bytes: int = 64 << 20,
) -> TransferReport:
    """Send what trainer rank ``rank`` owes to every engine rank; returns when all ranks are done. Collective with :func:`receive`.

    Args:
        tensors: Megatron's names to this rank's weights, a mapping for each model chunk; see ``export.chunks.by_chunk``.
        scales: the same for the block scales of FP8 weights.
        max_bytes: most bytes in one message; the same on every rank.

    Raises:
        LayoutError: a tensor is not what the plan says, here or on another rank, or ranks disagree about plan or version; no byte
            of any engine was written then.
        EngineError: a rank died on the way; engines may hold a mix of versions.
    """
    trainers, engines = plan.train.world_size, plan.rollout.world_size

    def check() -> list[tuple[int, Message]]:
        found = []
        for target in partners(rank, engines, trainers):
            copies = list(plan.copies(target, source_rank=rank))
            for _ in outgoing(copies, tensors, scales):
                pass
            found += [(trainers + target, message) for message in messages(copies, max_bytes)]
        return found

    with group.watched(group.check_peers):
        queue = _agreed(check, plan, policy_version, max_bytes, group)
        buffers = _buffers(queue, device)
        finishers: list[Callable[[], None]] = []
        for index, (peer, message) in enumerate(queue):
            if index >= len(buffers):
                finishers[index - len(buffers)]()
            buffer = buffers[index % len(buffers)]
            _copy(_paired(outgoing(message.copies, tensors, scales), buffer), into_buffer=True)
            finishers.append(group.send(buffer[: message.extent], peer))
        for finish in finishers[-len(buffers) :]:
            finish()
        group.smallest([1])
    return _report(queue, buffers)


def receive(
    plan: Plan,
    rank: int,
    parameters: Mapping[str, torch.Tensor],
    group: PairGroup,
    *,
    device: torch.device,
    policy_version: int,
    max_bytes: int = 64 << 20,
) -> TransferReport:
    """Fill engine rank ``rank``'s live parameters (vLLM's names); returns when all ranks are done. Collective with :func:`send`.

    Mark the engine as having no version before this call, and as having ``policy_version`` only after it returned. Arguments and
    errors as of :func:`send`.
    """
    trainers, engines = plan.train.world_size, plan.rollout.world_size

    def check() -> list[tuple[int, Message]]:
        check_parameters(plan, rank, parameters)
        by_source: dict[int, list[Copy]] = {}
        for copy in plan.copies(rank):
            by_source.setdefault(copy.source_rank, []).append(copy)
        for _ in places((copy for copies in by_source.values() for copy in copies), parameters):
            pass
        order = partners(rank, trainers, engines, backwards=True)
        return [(source, message) for source in order for message in messages(by_source.get(source, ()), max_bytes)]

    with group.watched(group.check_peers):
        queue = _agreed(check, plan, policy_version, max_bytes, group)
        buffers = _buffers(queue, device)
        fill_padding(plan, rank, parameters)

        def begin(index: int) -> Callable[[], None]:
            source, message = queue[index]
            return group.receive(buffers[index % len(buffers)][: message.extent], source)

        finishers = [begin(index) for index in range(min(len(buffers), len(queue)))]
        for index, (_, message) in enumerate(queue):
            finishers[index]()
            _copy(_paired(places(message.copies, parameters), buffers[index % len(buffers)]), into_buffer=False)
            if index + len(buffers) < len(queue):
                finishers.append(begin(index + len(buffers)))
        group.smallest([1])
    return _report(queue, buffers)


def partners(index: int, others: int, own: int, *, backwards: bool = False) -> list[int]:
    """Order in which rank ``index`` of ``own`` meets the ``others`` of the other side: in every round each has at most one partner.

    One side counts up, the other ``backwards``, so both ends of a pair meet in the same round and none waits in a circle.
    """
    rounds = max(own, others)
    met = ((index - turn if backwards else index + turn) % rounds for turn in range(rounds))
    return [other for other in met if other < others]


def messages(copies: Iterable[Copy], max_bytes: int) -> Iterator[Message]:
    """``copies`` in order, packed into messages of at most ``max_bytes``; a larger one is cut between the engine's rows of tiles.

    Raises LayoutError when ``max_bytes`` does not hold one row of tiles.
    """
    current: list[Copy] = []
    size = 0
    for copy in copies:
        for part in _cut(copy, max_bytes):
            extent = _extent(part)
            if current and size + extent > max_bytes:
                yield Message(tuple(current), size)
                current, size = [], 0
            current.append(part)
            size += extent
    if current:
        yield Message(tuple(current), size)


def _cut(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    if _extent(copy) <= max_bytes:
        yield copy
        return
    unit = TILE if copy.fp8 else 1
    one = copy._replace(target_row=copy.target_row // unit * unit, source_row=copy.source_row // unit * unit, rows=unit)
    steps = (max_bytes - 2 * ALIGNMENT) // one.nbytes
    if steps < 1:
        rows = f"{TILE} rows" if copy.fp8 else "one row"
        raise LayoutError(f"Messages of {max_bytes} bytes do not hold {rows} of {copy.target} ({one.nbytes} bytes): allow larger ones.")
    row, end = copy.target_row, copy.target_row + copy.rows
    while row < end:
        stop = min(end, (row // unit + steps) * unit)
        yield copy._replace(target_row=row, source_row=copy.source_row + row - copy.target_row, rows=stop - row)
        row = stop


def _extent(copy: Copy) -> int:
    scales = 0
    if copy.fp8:
        *_, rows, cols = copy.tiles
        scales = rows * cols * torch.float32.itemsize
    return _aligned(copy.nbytes - scales) + _aligned(scales)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _paired(pieces: Iterable[Piece], buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of a message with its place in the buffer, both as integers."""
    offset = 0
    for piece in pieces:
        for tensor in (piece.data, piece.scale_inv):
            if tensor is not None:
                size, carrier = tensor.numel() * tensor.element_size(), CARRIERS[tensor.element_size()]
                yield tensor.view(carrier), buffer[offset : offset + size].view(carrier).view(tensor.shape)
                offset += _aligned(size)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, into_buffer: bool) -> None:
    by_size: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor, place in pairs:
        targets, sources = by_size.setdefault(tensor.element_size(), ([], []))
        targets.append(place if into_buffer else tensor)
        sources.append(tensor if into_buffer else place)
    for targets, sources in by_size.values():
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _buffers(queue: Sequence[tuple[int, Message]], device: torch.device) -> list[torch.Tensor]:
    capacity = max((message.extent for _, message in queue), default=0)
    return [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(2)]


def _report(queue: Sequence[tuple[int, Message]], buffers: Sequence[torch.Tensor]) -> TransferReport:
    return TransferReport(
        num_bytes=sum(copy.nbytes for _, message in queue for copy in message.copies),
        messages=len(queue),
        buffer_bytes=sum(buffer.numel() for buffer in buffers),
    )


def _agreed(
    check: Callable[[], list[tuple[int, Message]]], plan: Plan, policy_version: int, max_bytes: int, group: PairGroup
) -> list[tuple[int, Message]]:
    """What ``check`` returns, once every rank's check has passed and all mean the same transfer."""
    found, refusal = [], None
    try:
        found = check()
    except UserError as error:
        refusal = error
    number = _number(plan, policy_version, max_bytes)
    passed, least, negated = group.smallest([int(refusal is None), number, -number])
    if refusal is not None:
        raise refusal
    if not passed:
        raise LayoutError("Another rank refused the weight transfer, see its message; nothing was written.")
    if least != -negated:
        raise LayoutError(
            f"The ranks disagree about the weight transfer, nothing was written: here it is policy version {policy_version} in messages of "
            f"{max_bytes} bytes; start every rank from one configuration."
        )
    return found


def _number(plan: Plan, policy_version: int, max_bytes: int) -> int:
    """62 bits that differ when two ranks mean different transfers."""
    shape = {name: getattr(plan.shape, name) for name in plan.shape.__dataclass_fields__}
    shape["kinds"] = [(kind.moe, sorted(kind.high_precision)) for kind in plan.shape.kinds]
    meant = (shape, plan.train, plan.rollout, plan.qkv_order, plan.spec, policy_version, max_bytes)
    return int.from_bytes(hashlib.sha256(repr(meant).encode()).digest()[:8]) >> 2
