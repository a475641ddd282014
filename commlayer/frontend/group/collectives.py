"""`Collectives`: each collective of torch, as memory and operations of the engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from ...compress.codec import Coding
from ...errors import ConfigError
from ...loss.operation_policy import OperationPolicy, PartialPolicy, can_lose
from ...plans.delivery import Lengths
from ...transport.base import DType, Op
from ...transport.call import ROOTED, Call, Exchanged
from ..work.work import CommWork
from .profile import profiled
from .rows import FLOATS, RowCoder
from .submit import Operation, Submitter
from .tensors import Kind, are_alike, are_plain, contribution, flatten, move_kind, op_name, reduction_kind, space

SUM = dist.ReduceOp(dist.ReduceOp.SUM)
ONLY_SUMS = "bounded loss needs sums or averages of dense floating-point tensors on the CPU"


class Collectives:
    """The collectives of one group, on this rank.

    Every method starts its operation and returns the work, or it returns None and has done nothing. None means that
    gloo takes the call: either for the kind of its tensors, which is the same on all ranks, or because the arguments
    make no sense, and gloo raises an error before it sends anything. `opts` are torch's options of the collective.

    `policy` holds for operations without one of their own. Its partial policy lets all-reduce and reduce-scatter lose
    contributions. `who` returns this rank of the job and the group, for errors.
    """

    def __init__(
        self, submitter: Submitter, rank: int, size: int, policy: OperationPolicy, who: Callable[[], str]
    ) -> None:
        self._submitter = submitter
        self._rank = rank
        self._size = size
        self._policy = policy
        self._who = who

    @profiled
    def all_reduce(
        self,
        tensors: list[Tensor],
        opts: Any,
        policy: OperationPolicy | None = None,
        coding: Coding | None = None,
    ) -> Work | None:
        """All-reduces any number of tensors of one dtype, in place.

        With `coding`, contributions and sums are encoded between hosts, and nothing is lost. Raises ConfigError if the
        codec cannot do that, or if `policy` allows losses and the reduction cannot do without a contribution.
        """
        op = opts.reduceOp  # to ask for it takes a while
        kind = reduction_kind(tensors, op)
        if coding is not None:
            kind = self._coded_kind("all-reduce", kind, tensors[0].dtype, coding)
        if kind is None:
            return None
        memory = contribution(tensors, kind, op)
        count = tensors[0].numel() if len(tensors) == 1 else sum(tensor.numel() for tensor in tensors)
        if policy is not None and policy.partial is not None and not can_lose(kind.op, kind.dtype):
            raise ConfigError(
                f"{self._who()}: {kind.reduction} of {tensors[0].dtype}: {ONLY_SUMS}; use a policy with loss_bound=0"
            )
        policy = policy or self._policy
        partial = _partial_of(policy, kind) if coding is None else None
        if memory is not tensors[0]:
            self._submitter.check_no_words()  # the host copies; and each all-reduce must ask for weights once
        operations = self._submitter.collective(
            "all_reduce",
            kind,
            count,
            memory,
            memory,
            partial=partial,
            pair=coding and coding.pair,
            signed=policy.signed,
        )
        call = Call.of("all_reduce", tensors, tensors, reduction=kind.reduction, signed=policy.signed)
        copies = [] if memory is tensors[0] else [(memory, tensors)]
        qos, key = None if partial is None else partial.qos, _key_of(operations, coding)
        return self._submitter.start(
            call,
            operations,
            opts,
            tensors,
            [memory, *tensors],
            copies,
            qos=qos,
            priority=policy.priority,
            codec_key=key,
        )

    @profiled
    def all_reduce_from(
        self,
        source: Tensor,
        target: Tensor,
        opts: Any,
        protect: Tensor | None = None,
        policy: OperationPolicy | None = None,
        coding: Coding | None = None,
    ) -> CommWork:
        """All-reduces one contiguous tensor of floating-point numbers into another of its shape, which may be the same.

        `missing` of the work returns the contributions in `source` that were not counted, with every treatment. With
        several ranks per host a contribution is the sum of a host. The rank that makes the sum of a range writes it to
        that range of `source`. `protect` is the map for `Qos.protect`, int64, with a bit per `packet_bytes` of the
        group. With `coding`, of float32 only, messages between hosts are encoded; `kept` of the work has the ranges of
        `source` that hold rounding errors and lost contributions in the end, if the codecs keep errors. Raises
        ConfigError for tensors that are not summed with losses, even if nothing may be lost here.
        """
        kind = reduction_kind([source, target], opts.reduceOp)
        flat = source.shape == target.shape and source.is_contiguous() and target.is_contiguous()
        if kind is None or kind.wide or kind.is_scaled or not can_lose(kind.op, kind.dtype) or not flat:
            raise ConfigError(
                f"{self._who()}: {op_name(opts.reduceOp)} of {source.dtype} {tuple(source.shape)} into "
                f"{target.dtype} {tuple(target.shape)}: {ONLY_SUMS}, contiguous and of one shape; use "
                f"allreduce"
            )
        priority, partial, signed = policy or self._policy
        count = source.numel()
        is_copied = source.data_ptr() != target.data_ptr()
        if is_copied and coding is None and partial is None:
            self._submitter.check_no_words()  # as below, and before this all-reduce asks for weights
        operations = self._submitter.collective(
            "all_reduce", kind, count, source, target, partial=partial, pair=coding and coding.pair, signed=signed
        )
        qos, plan = None, operations[0].plan if operations else None
        if partial is not None and plan is not None and plan.partial:
            qos = partial.qos
            if protect is not None:
                qos = dataclasses.replace(qos, protect=protect.data_ptr(), protect_bytes=partial.packet_bytes)
        elif plan is not None and not plan.encodes:
            if is_copied:
                self._submitter.check_no_words()  # the device has not filled the source yet
            target.copy_(source)
            operations = [operation._replace(source=operation.target) for operation in operations]
        memory = [source, target] if protect is None else [source, target, protect]
        call = Call.of("all_reduce", [source], [target], reduction=kind.reduction, signed=signed)
        key = _key_of(operations, coding)
        work = self._submitter.start(
            call, operations, opts, [target], memory, [], qos=qos, priority=priority, codec_key=key
        )
        work.kept = tuple(
            (operation.source - source.data_ptr() + offset, length)
            for operation in operations
            for offset, length in operation.plan.kept
        )
        return work

    @profiled
    def reduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """Reduces into the root's tensor; the other ranks keep theirs."""
        kind = reduction_kind(tensors, opts.reduceOp) if self._is_rank(opts.rootRank) and len(tensors) == 1 else None
        if kind is None:
            return None
        memory = contribution(tensors, kind, opts.reduceOp)
        operations = self._submitter.collective("reduce", kind, memory.numel(), memory, memory, opts.rootRank)
        call = Call.of("reduce", tensors, tensors, reduction=kind.reduction, rank=opts.rootRank)
        copies = [] if memory is tensors[0] or self._rank != opts.rootRank else [(memory, tensors)]
        return self._submitter.start(call, operations, opts, tensors, [memory, *tensors], copies)

    @profiled
    def reduce_scatter(
        self,
        pairs: list[tuple[Tensor, list[Tensor]]],
        opts: Any,
        policy: OperationPolicy | None = None,
        coding: Coding | None = None,
    ) -> Work | None:
        """Reduces pairs of an output and its inputs, which have n times as many elements: a shard for each rank.

        With `coding`, contributions are encoded between hosts, and nothing is lost. Raises ConfigError if the codec
        cannot do that.
        """
        kind = reduction_kind([output for output, _ in pairs[:1]], opts.reduceOp)
        if coding is not None:
            self._check_shard("reduce-scatter", pairs[0][1][0], pairs[0][0])
            kind = self._coded_kind("reduce-scatter", kind, pairs[0][0].dtype, coding)
        if kind is None or not self._are_shards(pairs):
            return None
        policy = policy or self._policy
        partial = _partial_of(policy, kind) if coding is None else None
        operations, memory, copies = [], [], []
        for output, inputs in pairs:
            source = contribution(inputs, kind, opts.reduceOp)
            target = space([output], kind.wide)
            operations += self._submitter.collective(
                "reduce_scatter", kind, output.numel(), source, target, partial=partial, pair=coding and coding.pair
            )
            memory += [source, target, *inputs]
            if target is not output:
                copies.append((target, [output]))
        results = [output for output, _ in pairs]
        given = [tensor for _, inputs in pairs for tensor in inputs]
        call = Call.of("reduce_scatter", given, results, reduction=kind.reduction)
        qos, key = None if partial is None else partial.qos, _key_of(operations, coding)
        return self._submitter.start(
            call, operations, opts, results, memory, copies, qos=qos, priority=policy.priority, codec_key=key
        )

    def reduce_scatter_list(self, output: Tensor, inputs: list[Tensor], opts: Any) -> Work | None:
        """inputs[r] is this rank's contribution to rank r. Inputs of unequal length take a reduce to each rank."""
        if len(inputs) != self._size or output.numel() != inputs[self._rank].numel():
            return None
        if are_alike(inputs, output):
            return self.reduce_scatter([(output, inputs)], opts)
        kind = reduction_kind([output, *inputs], opts.reduceOp)
        if kind is None:
            return None
        operations: list[Operation] = []
        memory = [*inputs]
        target = space([output], kind.wide)
        for root, tensor in enumerate(inputs):
            part = contribution([tensor], kind, opts.reduceOp)
            if root == self._rank:
                with torch.no_grad():
                    part = target.view(-1).copy_(part.view(-1))
            operations += self._submitter.collective("reduce", kind, tensor.numel(), part, part, root)
            memory.append(part)
        call = Call.of("reduce_scatter", inputs, [output], reduction=kind.reduction)
        copies = [] if target is output else [(target, [output])]
        return self._submitter.start(call, operations, opts, [output], memory, copies)

    @profiled
    def all_gather(
        self,
        pairs: list[tuple[list[Tensor], Tensor]],
        opts: Any,
        policy: OperationPolicy | None = None,
        coding: Coding | None = None,
    ) -> Work | None:
        """Gathers pairs of outputs and their input; the outputs have n times as many elements: a shard of each rank.

        With `coding`, shards are encoded between hosts; then all ranks have the same rounded values. Raises ConfigError
        if the codec cannot do that.
        """
        kind = move_kind(pairs[0][1].dtype) if pairs else None
        if coding is not None:
            self._check_shard("all-gather", pairs[0][1], pairs[0][0][0])
            kind = reduction_kind([pairs[0][1]], SUM)
            kind = self._coded_kind("all-gather", kind, pairs[0][1].dtype, coding)
        if kind is None or not self._are_shards((shard, outputs) for outputs, shard in pairs):
            return None
        operations, memory, copies = [], [], []
        for outputs, shard in pairs:
            source, target = contribution([shard], kind, SUM), space(outputs, kind.wide)
            operations += self._submitter.collective(
                "all_gather", kind, shard.numel(), source, target, pair=coding and coding.pair
            )
            memory += [source, target, *outputs]
            if target is not outputs[0]:
                copies.append((target, outputs))
        results = [output for outputs, _ in pairs for output in outputs]
        call = Call.of("all_gather", [shard for _, shard in pairs], results)
        priority, key = (policy or self._policy).priority, _key_of(operations, coding)
        return self._submitter.start(call, operations, opts, results, memory, copies, priority=priority, codec_key=key)

    def all_gather_list(self, outputs: list[Tensor], tensor: Tensor, opts: Any) -> Work | None:
        """outputs[r] is the tensor of rank r, which may have any length."""
        if len(outputs) != self._size or outputs[self._rank].numel() != tensor.numel():
            return None
        if are_alike(outputs, tensor):
            return self.all_gather([(outputs, tensor)], opts)
        if not are_plain([tensor, *outputs]):
            return None
        sent = (tensor.nbytes,) * self._size
        received = tuple(output.nbytes for output in outputs)
        return self._deliver("all_gather", sent, received, [tensor], outputs, opts, same=True)

    @profiled
    def all_gather_lists(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work | None:
        """outputs[r][i] is tensor i of rank r."""
        everything = list(chain(*outputs))
        shapes = [tensor.shape for tensor in tensors]
        if (
            len(outputs) != self._size
            or any([output.shape for output in row] != shapes for row in outputs)
            or not tensors
        ):
            return None
        kind = move_kind(tensors[0].dtype)
        if kind is None or not are_plain([*tensors, *everything]):
            return None
        source, target = flatten(tensors), space(everything)
        count = sum(tensor.numel() for tensor in tensors)
        operations = self._submitter.collective("all_gather", kind, count, source, target)
        call = Call.of("all_gather", tensors, everything)
        copies = [] if target is everything[0] else [(target, everything)]
        return self._submitter.start(call, operations, opts, everything, [source, target, *everything], copies)

    @profiled
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """Copies the root's tensor to that of every other rank."""
        kind = move_kind(tensors[0].dtype) if self._is_rank(opts.rootRank) and len(tensors) == 1 else None
        if kind is None or not are_plain(tensors):
            return None
        memory = flatten(tensors)
        operations = self._submitter.collective("broadcast", kind, tensors[0].numel(), memory, memory, opts.rootRank)
        call = Call.of("broadcast", tensors, tensors, rank=opts.rootRank)
        copies = [] if memory is tensors[0] else [(memory, tensors)]
        return self._submitter.start(call, operations, opts, tensors, [memory], copies)

    @profiled
    def gather(self, outputs: list[Tensor], tensor: Tensor, opts: Any) -> Work | None:
        """Copies every rank's tensor to the root's outputs; other ranks have no outputs."""
        root, length = opts.rootRank, tensor.nbytes
        if not self._is_list_of_root(outputs, tensor, root):
            return None
        sent = tuple(length if rank == root else None for rank in range(self._size))
        received = (length if self._rank == root else None,) * self._size
        return self._deliver("gather", sent, received, [tensor], outputs, opts, root, same=True)

    @profiled
    def scatter(self, output: Tensor, inputs: list[Tensor], opts: Any) -> Work | None:
        """Copies the root's inputs, one to each rank's output; other ranks have no inputs."""
        root, length = opts.rootRank, output.nbytes
        if not self._is_list_of_root(inputs, output, root):
            return None
        sent = (length if self._rank == root else None,) * self._size
        received = tuple(length if rank == root else None for rank in range(self._size))
        return self._deliver("scatter", sent, received, inputs, [output], opts, root)

    @profiled
    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        """Sends inputs[r] to rank r, and receives outputs[r] from it."""
        if len(outputs) != self._size or len(inputs) != self._size or not are_plain([*inputs, *outputs]):
            return None
        sent, received = tuple(given.nbytes for given in inputs), tuple(output.nbytes for output in outputs)
        self._check_own_part(sent, received)
        return self._deliver("all_to_all", sent, received, inputs, outputs, opts)

    @profiled
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
        policy: OperationPolicy | None = None,
        coding: Coding | None = None,
    ) -> Work | None:
        """The splits are rows (of dimension 0) per rank; without them all ranks send and receive equal parts.

        With `coding`, rows for other hosts are encoded in the codec of contributions, those of each rank by themselves.
        Raises ConfigError if the codec cannot do that.
        """
        if coding is not None and not (tensor.dtype == output.dtype and tensor.dtype in FLOATS):
            raise ConfigError(
                f"{self._who()}: this encoded all-to-all is from {tensor.dtype} into {output.dtype}: codecs are for "
                f"rows of one floating-point type; use the operation without a codec"
            )
        if not are_plain([tensor, output]):
            return None
        sent = self._split_bytes(tensor, input_splits, "input")
        received = self._split_bytes(output, output_splits, "output")
        if sent is None or received is None:
            return None
        self._check_own_part(sent, received)
        unit = ("rows", tensor.itemsize * (tensor.shape[1:].numel() or 1))
        if policy is None:
            return self._deliver("all_to_all", sent, received, [tensor], [output], opts, unit=unit)
        coder = None
        if coding is not None:
            coder = RowCoder(coding.pair.up, coding.key, tensor.dtype, self._rank, self._submitter.local)
        signed = (coder.codec.name if coder else "", tensor.shape[1:].numel())
        if coder is None or coder.is_exact:
            return self._deliver(
                "all_to_all",
                _agreed(sent),
                _agreed(received),
                [tensor],
                [output],
                opts,
                signed=signed,
                priority=policy.priority,
            )
        self._submitter.check_no_words()  # the host encodes
        sent, received = (tuple(length // tensor.itemsize for length in lengths) for lengths in (sent, received))
        source = coder.encoded(flatten([tensor]), sent)
        lengths = coder.lengths(received)
        target = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        what = ("all_to_all", 0, tensor.dtype, *signed)
        operations = self._submitter.delivery(what, _agreed(coder.lengths(sent)), _agreed(lengths), source, target)
        return self._submitter.start(
            Call.of("all_to_all", [tensor], [output]),
            operations,
            opts,
            [output],
            [source, target, output],
            [],
            priority=policy.priority,
            finish=functools.partial(coder.decode, target, output, received),
        )

    @profiled
    def barrier(self, opts: Any) -> Work:
        """Ends on no rank before it has begun on all."""
        return self._submitter.start(Call("barrier"), self._submitter.barrier(), opts, [], [], [])

    def _deliver(
        self,
        name: str,
        sent: Lengths,
        received: Lengths,
        inputs: list[Tensor],
        outputs: list[Tensor],
        opts: Any,
        root: int = 0,
        *,
        same: bool = False,
        signed: tuple[object, ...] = (),
        priority: int | None = None,
        unit: tuple[str, int] | None = None,
    ) -> Work:
        """Delivers bytes, see `plans.delivery`. `unit`: that which the caller counts, and its bytes; None: elements."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        source = flatten(inputs) if inputs else nothing
        target = space(outputs) if outputs else nothing
        what = (name, root, (outputs or inputs)[0].dtype, *signed)
        operations = self._submitter.delivery(what, sent, received, source, target, same=same)
        copies = [] if not outputs or target is outputs[0] else [(target, outputs)]
        unit = unit or ("elements", (outputs or inputs)[0].element_size())
        exchanged = Exchanged(sent, received, *unit)
        call = Call.of(name, inputs, outputs, rank=root if name in ROOTED else None, exchanged=exchanged)
        memory = [source, target, *outputs]
        return self._submitter.start(call, operations, opts, outputs, memory, copies, priority=priority)

    def _are_shards(self, pairs: Iterable[tuple[Tensor, list[Tensor]]]) -> bool:
        """Whether each pair is a shard and a whole of one dtype on the CPU, and the whole has a shard per rank."""
        dtype = None
        for shard, whole in pairs:
            dtype = dtype or shard.dtype
            if shard.dtype != dtype or not (are_plain([shard, *whole])):
                return False
            if sum(tensor.numel() for tensor in whole) != shard.numel() * self._size:
                return False
        return True

    def _check_shard(self, what: str, source: Tensor, target: Tensor) -> None:
        shard, whole = sorted((source.numel(), target.numel()))
        if source.dtype != target.dtype or whole != shard * self._size:
            fault = f"from {source.dtype} {tuple(source.shape)} into {target.dtype} {tuple(target.shape)}"
            raise ConfigError(f"{self._who()}: this encoded {what} is {fault}; use the operation without a codec")

    def _coded_kind(self, what: str, kind: Kind | None, dtype: torch.dtype, coding: Coding) -> Kind:
        """How the engine encodes: float32, to which other floating-point types are converted first."""
        is_plain = dtype == torch.float32
        if kind is None or dtype not in FLOATS or kind.op != Op.SUM or (kind.is_scaled and not is_plain):
            fault = f"is of {dtype}: codecs are for sums, averages and copies of dense floating-point numbers"
        elif coding.pair.keeps_errors:
            fault = f"with {coding.pair} would lose rounding errors, which that codec keeps for the next step"
        else:
            return kind if is_plain else kind._replace(dtype=DType.F32, wide=torch.float32)
        raise ConfigError(f"{self._who()}: this encoded {what} {fault}; use the operation without a codec")

    def _is_rank(self, rank: int) -> bool:
        return 0 <= rank < self._size

    def _is_list_of_root(self, tensors: list[Tensor], one: Tensor, root: int) -> bool:
        """Whether the root, and no other rank, has a list of a tensor like `one` for every rank."""
        if not self._is_rank(root) or not are_plain([one, *tensors]):
            return False
        return are_alike(tensors, one) and len(tensors) == (self._size if self._rank == root else 0)

    def _split_bytes(self, tensor: Tensor, splits: Sequence[int], what: str) -> tuple[int, ...] | None:
        rows = tensor.size(0) if tensor.dim() else 0
        if splits:
            if len(splits) != self._size or sum(splits) != rows:
                return None
            if min(splits) < 0:
                raise ConfigError(
                    f"{self._who()}: {what} split sizes {splits} contain a negative number: use 0 or more"
                )
            row_bytes = tensor.nbytes // rows if rows else 0
            return tuple(split * row_bytes for split in splits)
        if tensor.dim() == 0 or rows % self._size:
            raise ConfigError(
                f"{self._who()}: an {what} of shape {tuple(tensor.shape)} does not divide equally among "
                f"{self._size} ranks in dimension 0; pass split sizes"
            )
        return (tensor.nbytes // self._size,) * self._size

    def _check_own_part(self, sent: Sequence[int], received: Sequence[int]) -> None:
        if sent[self._rank] != received[self._rank]:
            raise ConfigError(
                f"{self._who()}: sends {sent[self._rank]} bytes to itself, but receives {received[self._rank]}; "
                f"make its own input and output splits equal"
            )


def _agreed(lengths: Sequence[int]) -> Lengths:
    """The lengths of splits that the ranks have compared: they know which of them are 0."""
    return tuple(length or None for length in lengths)


def _partial_of(policy: OperationPolicy, kind: Kind) -> PartialPolicy | None:
    """The partial policy of a reduction whose caller does not ask for `missing`: the result makes up for losses."""
    partial = policy.partial
    return partial if partial is not None and partial.makes_up_at_once and can_lose(kind.op, kind.dtype) else None


def _key_of(operations: Sequence[Operation], coding: Coding | None) -> int | None:
    """The codec key of operations with these plans; None if they encode nothing."""
    return coding.key if coding is not None and operations and operations[0].plan.encodes else None
