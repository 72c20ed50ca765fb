"""Target: functions that make values of messages, each fed messages of its type; refusals are `AxonError`s."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from axon_ps.coordinator import messages, span_messages
from axon_ps.errors import AxonError
from axon_ps.rpc.status import error_from_detail
from axon_ps.types import DType, Grouping, Member, Membership, Role
from axon_ps.wire import calls, changes, codec, frames
from axon_ps.wire.differences import membership_from_difference
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    collective_pb2,
    common_pb2,
    layout_pb2,
    membership_pb2,
    placement_pb2,
    policy_pb2,
    session_pb2,
    status_pb2,
    trace_pb2,
)
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.findings import Case, Findings, where
from axon_ps_lab.fuzz.grown import Facts, Grower

NUMEL: Final = 64


def _chunk(data: bytes) -> None:
    header, payload = frames.decode_chunk(data)
    frames.payload_array(header, payload, NUMEL, lambda numel: numel + 4)
    if header.compressed:
        changes.apply_changes(payload, np.zeros(NUMEL, np.float32))


def _collective(data: bytes) -> None:
    header, payload = frames.decode_bulk(collective_pb2.CollectiveChunk, data)
    for dtype in (DType.F32, DType.BOOL, DType.BF16):
        frames.elements(payload, dtype)
    if header.HasField("begin") and header.begin.HasField("call"):
        calls.call_from_proto(header.begin.call, 2)


def _difference(message: membership_pb2.MembershipDifference) -> None:
    """Decode a difference to a small membership."""
    membership_from_difference(BEFORE, message)


BEFORE: Final = Membership(
    generation=0,
    step=1,
    version=0,
    workers=tuple(Member(role=Role.WORKER, rank=r, incarnation=str(r), node="", replica=r) for r in range(3)),
    shards=(Member(role=Role.SHARD, rank=0, incarnation="s", node=""),),
    num_replicas=1,
    complete=True,
    grouping=Grouping(rows=((0, 1), (2, 3))),
)

RAW: Final[dict[str, tuple[Callable[[bytes], Any], Any]]] = {
    "Chunk": (_chunk, common_pb2.Chunk.DESCRIPTOR),
    "CollectiveChunk": (_collective, collective_pb2.CollectiveChunk.DESCRIPTOR),
}
"""Decoders of encoded messages."""

PARSED: Final[dict[Callable[[Any], Any], Any]] = {
    codec.member_from_proto: membership_pb2.Member,
    codec.membership_from_proto: membership_pb2.MembershipEvent,
    _difference: membership_pb2.MembershipDifference,
    codec.placement_from_proto: placement_pb2.Placement,
    codec.copy_from_proto: membership_pb2.CopyFrom,
    codec.layout_from_proto: layout_pb2.Layout,
    codec.hyper_from_proto: common_pb2.Hyper,
    codec.optimizer_from_proto: common_pb2.OptimizerSpec,
    codec.policy_from_proto: policy_pb2.Policy,
    codec.compression_from_proto: layout_pb2.Compression,
    codec.job_spec_from_proto: layout_pb2.JobSpec,
    codec.decision_from_proto: session_pb2.DecisionEvent,
    codec.replica_clock_from_proto: common_pb2.Turn,
    messages.join_from_proto: session_pb2.Join,
    messages.vote_from_proto: session_pb2.Vote,
    messages.ready_from_proto: session_pb2.Ready,
    messages.copied_from_proto: placement_pb2.Copied,
    messages.snapshot_report_from_proto: checkpoint_pb2.SnapshotReport,
    messages.job_from_proto: session_pb2.JobEvent,
    messages.event_from_proto: session_pb2.SessionEvent,
    messages.status_from_proto: status_pb2.StatusReply,
    span_messages.TRACE_ORDER.from_proto: trace_pb2.TraceOrder,
    span_messages.report_from_proto: trace_pb2.SpanReport,
    error_from_detail: common_pb2.ErrorDetail,
}
"""Decoders of messages that gRPC has parsed."""

DECODERS: Final = RAW | {
    decode.__name__: (lambda data, decode=decode, parse=kind.FromString: decode(parse(data)), kind.DESCRIPTOR)
    for decode, kind in PARSED.items()
}


class Decoders:
    """See the module.

    Args:
        findings: gets the findings.
    """

    name = "decoders"

    def __init__(self, findings: Findings) -> None:
        self.messages = 0
        self.decoded = 0
        self._findings = findings
        self._grower = Grower(Facts())
        self._names = list(DECODERS)

    def close(self) -> None:
        """Do nothing, since nothing is open."""

    def run(self, entropy: Entropy) -> None:
        """Decode a few messages."""
        for _ in range(1 + entropy.below(8)):
            name = entropy.pick(self._names)
            self.replay(Case(self.name, name, (self._grower.message(DECODERS[name][1], entropy),)))

    def replay(self, case: Case) -> None:
        """Decode one message; if it is a bulk message, protobuf must read the same content."""
        decode, kind = DECODERS[case.what]
        self.messages += 1
        try:
            decode(case.messages[0])
            self.decoded += 1
        except (AxonError, DecodeError):
            pass
        except Exception as error:
            self._findings.add(f"{case.what}: {where(error)}", [case], repr(error))
        if case.what in RAW:
            self._compare(case, kind)

    def _compare(self, case: Case, kind: Descriptor) -> None:
        """Compare with protobuf: both accept a bulk message, with the same content, or neither does."""
        parsed: Any = GetMessageClass(kind)
        header, data = None, case.messages[0]
        with contextlib.suppress(AxonError):
            header, payload = frames.decode_bulk(parsed, data)
        try:
            message = parsed.FromString(data)
        except DecodeError:
            message = None
        if (header is None) != (message is None):
            self._findings.add(f"{case.what}: protobuf and we do not agree whether it is one", [case])
        elif message is not None and header is not None:
            header.payload = bytes(payload)
            if header.SerializeToString(deterministic=True) != message.SerializeToString(deterministic=True):
                self._findings.add(f"{case.what}: protobuf and we do not agree what it says", [case])
