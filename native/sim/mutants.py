"""Breaks the engine in many small ways, one at a time, and shows that the simulator notices: `make sim-mutants`.

Each mutant is a replacement in one file of a copy of native/. It must apply, build, and fail within SEEDS seeds; the
table says with which seed and which invariant. A mutant whose text is no longer there counts as a failure: fix it.
Words after the command choose the mutants whose name or file has one of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutants"
PLANS = ROOT / "build" / "plans.bin"
SEEDS = 3000
JOBS = 2


class Mutant(NamedTuple):
    """One defect: `old` in native/`file` becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "end a collective early on the caller's memory",
        "protocol/endpoint.c",
        "    send->data = data;\n}",
        "}",
    ),
    Mutant(
        "end a collective one step too early",
        "plan/executor.c",
        "executor->remaining == executor->sends &&",
        "executor->remaining <= executor->sends + 1 &&",
    ),
    Mutant(
        "leave what waits for a port on the caller's memory",
        "protocol/endpoint.c",
        "    cl_outbox_move(&endpoint->outbox, &send->message, send->data, data);\n",
        "",
    ),
    Mutant(
        "give both queues of a class the same half of its staging",
        "group/host_queue.h",
        "return (queue & 1) | parity;",
        "return parity + 0 * queue;",
    ),
    Mutant(
        "begin an operation before the one before it in its queue has ended",
        "group/host_queue.c",
        "queues->pairs ? queue->base : queue->previous_base",
        "queue->previous_base",
    ),
    Mutant(
        "deliver duplicates twice",
        "protocol/message.c",
        "if (message->arrived[packet / 64] & bit)",
        "if (message->arrived[packet / 64] & bit & 0)",
    ),
    Mutant(
        "never send a message's last packet again",
        "protocol/message.c",
        "return cl_message_has_arrived(&send->message, packet) ||",
        "return cl_message_has_arrived(&send->message, packet) || packet + 1 == send->message.packet_count ||",
    ),
    Mutant(
        "never say READY",
        "protocol/endpoint.c",
        "else if (refused)",
        "else if (refused && !from)",
    ),
    Mutant(
        "wait for the dead three times as long",
        "protocol/peer.c",
        "timeout_us / CL_PEER_ASK_WAITING + peer->timeout_us;",
        "timeout_us / CL_PEER_ASK_WAITING + 3 * peer->timeout_us;",
    ),
    Mutant(
        "give the silent half the time",
        "protocol/peer.c",
        "timeout_us / CL_PEER_ASK_WAITING + peer->timeout_us;",
        "timeout_us / CL_PEER_ASK_WAITING + peer->timeout_us / 2;",
    ),
    Mutant(
        "do not remember finished messages",
        "protocol/inbound.c",
        "if (closed != NULL || cl_history_contains(&peer->history, &id))",
        "if (closed != NULL)",
    ),
    Mutant(
        "end messages that miss more than their loss bound",
        "protocol/partial.c",
        "receive->message.packet_count - receive->message.packets_arrived > receive->message.loss_budget)",
        "receive->message.packet_count - receive->message.packets_arrived > 2 * receive->message.loss_budget)",
    ),
    Mutant(
        "lose protected packets",
        "protocol/partial.c",
        "(partial->guarded && is_protected(send, packet)) ||",
        "",
    ),
    Mutant(
        "repeat packets of messages that have ended",
        "protocol/repeat.c",
        "message->generation != packet->data.generation || ",
        "",
    ),
    Mutant(
        "ignore a PROBE that overtakes its message",
        "protocol/partial.c",
        "return CL_PROBED_NOTHING;",
        "return CL_PROBED;",
    ),
    Mutant(
        "keep quiet about the first range that is missing",
        "plan/missing.c",
        "noted &= cl_ranges_add(&missing->uncounted, start, end);",
        "noted &= i == 0 || cl_ranges_add(&missing->uncounted, start, end);",
    ),
    Mutant(
        "forget that a contribution is absent",
        "plan/missing.c",
        "noted &= add_absent(missing, start, end);",
        "noted &= i == 0 || add_absent(missing, start, end);",
    ),
    Mutant(
        "keep an abort to oneself",
        "protocol/ending.c",
        "if (peer != NULL) /* or lost",
        "if (peer == NULL) /* or lost",
    ),
    Mutant(
        "take refused packets for delivered",
        "protocol/outcome.c",
        "send->refused++;\n        if (!cl_messages_give_back(endpoint, send, packet->data.packet))",
        "on_done(endpoint, send, packet->data.packet);",
    ),
    Mutant(
        "ask nobody once nothing is left to send",
        "protocol/outcome.c",
        "cl_partial_run_out(endpoint, send);         /* an earlier",
        "/* an earlier",
    ),
    *(
        Mutant(
            f"do not send a lost {kind} again",
            "protocol/outcome.c",
            "packet->kind != CL_PACKET_DATA && packet->kind != CL_PACKET_PING",
            f"packet->kind != CL_PACKET_DATA && packet->kind != CL_PACKET_PING && packet->kind != CL_PACKET_{kind}",
        )
        for kind in ("REQUEST", "GRANT")
    ),
    Mutant(
        "never write credit off",
        "protocol/credit.c",
        "            write_off(ledger, receive);",
        "            receive->credit.owed_us = now_us;",
    ),
    Mutant(
        "keep the credit of messages that have ended",
        "protocol/credit.c",
        "write_off(&endpoint->ledger, receive);",
        "",
    ),
    Mutant(
        "forget a REQUEST that comes before the call",
        "protocol/credit.c",
        "if (receive->credit.requested)\n        begin(",
        "if (receive->credit.requested && now_us == 0)\n        begin(",
    ),
    Mutant(
        "mix up messages that share their memory",
        "protocol/outcome.c",
        "send->message.generation == packet->data.generation &&",
        "send->message.posted &&",
    ),
    Mutant(
        "unexpected packets without limit",
        "protocol/unexpected.c",
        "if (unexpected->used_bytes + cost(unexpected) > unexpected->limit_bytes)",
        "if (unexpected->used_bytes + cost(unexpected) > 100 * unexpected->limit_bytes)",
    ),
    Mutant(
        "take any tag for right",
        "protocol/inbound.c",
        "if (!cl_packet_open(bytes, cl_endpoint_seal(endpoint, peer), endpoint->config.self, *number))",
        "if (!cl_packet_open(bytes, cl_endpoint_seal(endpoint, peer), endpoint->config.self, *number) && !packet)",
    ),
    Mutant(
        "do not compare signatures in shared memory",
        "plan/executor.c",
        "signature != NULL && step->message > 0",
        "signature == NULL && step->message > 0",
    ),
    Mutant(
        "never give a path up",
        "protocol/path.h",
        "CL_PATH_DEAD_PTOS = 2,",
        "CL_PATH_DEAD_PTOS = 2000,",
    ),
    Mutant(
        "forget what was on a dead path",
        "protocol/path.c",
        "cl_loss_give_up(&path->loss, &path->sent, count_lost, &losses);",
        "while (path->sent.packets > 0)\n                cl_sent_remove(&path->sent, path->sent.low);",
    ),
    Mutant(
        "never probe in silence",
        "protocol/upkeep.c",
        "cl_path_pto_us(path) <= now_us",
        "cl_path_pto_us(path) == 0",
    ),
    Mutant(
        "never set the timer of a probe",
        "protocol/loss.c",
        "if (sent->packets == sent->pings)",
        "if (sent->packets == sent->pings || rtt)",
    ),
    Mutant(
        "let the last class starve",
        "protocol/queue.c",
        "queue->packets % CL_QUEUE_GUARD == CL_QUEUE_GUARD - 1",
        "queue->packets % CL_QUEUE_GUARD == CL_QUEUE_GUARD",
    ),
    Mutant(
        "do not wait for the others of the host",
        "plan/executor.c",
        "if ((int32_t)(value - (host->base + step->message)) < 0)",
        "if ((int32_t)(value - (host->base + step->message)) < -1)",
    ),
    Mutant(
        "acknowledge more than what came",
        "protocol/ack.c",
        "cl_store_u16(out + 4 * written + 2, count > UINT16_MAX ? UINT16_MAX : (uint32_t)count);",
        "cl_store_u16(out + 4 * written + 2, count > UINT16_MAX ? UINT16_MAX : (uint32_t)count + (i > 0));",
    ),
    Mutant(
        "do not wait until the others have left the staging",
        "group/host_queue.c",
        "queue->base : queue->previous_base;",
        "queue->base : queue->previous_base - posts;",
    ),
    Mutant(
        "use one half of the staging only",
        "group/host_queue.c",
        "0 : queue->operations & 1;",
        "0 : queue->operations & 0;",
    ),
    Mutant(
        "give two operations the same counter values",
        "group/host_queue.c",
        "queue->base += posts + 1;",
        "queue->base += posts;",
    ),
    Mutant(
        "run two operations in shared memory at once",
        "group/group.c",
        "return first && !atomic_load",
        "return !atomic_load",
    ),
    Mutant(
        "let a host queue wait for the more urgent ones",
        "group/group.c",
        "} else if (!used_up) {\n            budget = CL_WORK_BUDGET_BESIDE_BYTES;",
        "} else if (!used_up) {\n            budget = 0;",
    ),
    Mutant(
        "forget to tell the peers that a group failed",
        "group/group.c",
        "cl_endpoint_abort(group->endpoint, group->id, group->peers, group->size, reason,",
        "cl_endpoint_abort(group->endpoint, group->id, group->peers, 0, reason,",
    ),
    Mutant(
        "do not mix operations into the signature",
        "group/group.c",
        "(group->signature ^ operation->signature) *",
        "(group->signature ^ 1) *",
    ),
    Mutant(
        "forget the death of a rank of one's host",
        "group/group.c",
        "atomic_store(&queues->lost[i], true);",
        "atomic_store(&queues->lost[i], false);",
    ),
    Mutant(
        "name no culprit for a lost message",
        "group/group.c",
        "cl_group_fail(group, completion->status, rank_of(group, completion->peer));",
        "cl_group_fail(group, completion->status, UINT32_MAX);",
    ),
    Mutant(
        "never let an operation time out",
        "group/group.c",
        "if (status == CL_EAGAIN && now_us >= operation->deadline_us)",
        "if (status == CL_EAGAIN && !now_us)",
    ),
    Mutant(
        "take the wrong rank for any source",
        "group/mailbox.c",
        "ticket->source = rank;",
        "ticket->source = (rank + 1) % mailbox->size;",
    ),
    Mutant(
        "let a receive overtake one from any source",
        "group/mailbox.c",
        "while (queue != NULL && queue->tag != ticket->tag)",
        "while (queue != NULL)",
    ),
    Mutant(
        "number the messages of all tags together",
        "group/mailbox.c",
        "*index = cl_tags_messages(&mailbox->sent[rank], tag);",
        "*index = cl_tags_messages(&mailbox->sent[rank], 0);",
    ),
    Mutant(
        "receive from any source only what finds room",
        "group/mailbox.c",
        "queue == NULL || !cl_endpoint_want(mailbox->endpoint, mailbox->group, ticket->tag, now_us)",
        "queue == NULL || !(now_us + 1)",
    ),
    Mutant(
        "exchange messages with the wrong rank",
        "group/p2p.c",
        "operation->pair[1] = mailbox->peers[operation->ticket.source];",
        "operation->pair[1] = mailbox->peers[(operation->ticket.source + 1) % mailbox->size];",
    ),
    Mutant(
        "start a receive before it has a message",
        "group/p2p.c",
        "operation->name = CL_WAITING;",
        "operation->name = CL_NAMED;",
    ),
    Mutant(
        "give a message within a host to a receive of any tag",
        "group/incoming.c",
        "if ((*at)->tag == tag)",
        "if ((*at)->tag == tag || (*at)->tag != tag)",
    ),
    Mutant(
        "say TAKEN before the memory is read",
        "group/incoming.c",
        "if (io->read_memory(",
        "if (incoming->length == 0 && io->read_memory(",
    ),
    Mutant(
        "never ask for the data that cannot be read",
        "group/incoming.c",
        "if (!cl_channel_write(channels, channel, &entry, NULL, 0, 0))",
        "if (taken && !cl_channel_write(channels, channel, &entry, NULL, 0, 0))",
    ),
    Mutant(
        "write into a full ring",
        "group/ring.c",
        "< cost && cl_ring_room(ring) < cost)",
        "< cost && cl_ring_room(ring) > ring->bytes)",
    ),
    Mutant(
        "wait for a dead rank of the host",
        "group/channel.c",
        "return atomic_load(&channels->lost[index]) ||",
        "return atomic_load(&channels->lost[index]) > 1 ||",
    ),
    Mutant(
        "keep the last encoded contribution only",
        "plan/executor.c",
        "(step->kind == CL_RECV_REDUCE ? codec->decode_add : codec->decode)(",
        "(step->kind == CL_RECV_REDUCE && offset == 0 ? codec->decode_add : codec->decode)(",
    ),
    Mutant(
        "decode packets at the place of their bytes",
        "plan/missing.c",
        "return (struct cl_range){encoded->start / codec->block_bytes * value_bytes,",
        "return (struct cl_range){encoded->start,",
    ),
    Mutant(
        "send encoded values at the length of the plain ones",
        "plan/executor.c",
        "(codec == NULL ? step->length :",
        "(codec == NULL || step->kind == CL_SEND ? step->length :",
    ),
    Mutant(
        "cut messages to packets larger than the peer takes",
        "protocol/endpoint.c",
        "peer->payload_bytes - peer->payload_bytes % block_bytes)",
        "endpoint->payload_bytes - endpoint->payload_bytes % block_bytes)",
    ),
    Mutant(
        "take packets that the job's key has sealed from a pair with its own",
        "protocol/inbound.c",
        "    if (!cl_packet_open(bytes, cl_endpoint_seal(endpoint, peer), endpoint->config.self, *number))",
        "    if (!cl_packet_open(bytes, cl_endpoint_seal(endpoint, peer), endpoint->config.self, *number) &&\n"
        "        !cl_packet_open(bytes, &endpoint->seal, endpoint->config.self, *number))",
    ),
    Mutant(
        "forget that packet numbers wrap",
        "protocol/packet.h",
        "return distance < 0 && (uint64_t)-distance > near ? low : near + (uint64_t)distance;",
        "return distance < 0 && (uint64_t)-distance > near ? low : (near >> 32 << 32) + low;",
    ),
    Mutant(
        "keep marks to oneself",
        "protocol/path.c",
        "if (marked < CL_ACK_MARKS / 2)",
        "if (marked > CL_ACK_MARKS)",
    ),
    Mutant(
        "take a black hole for congestion",
        "protocol/mtu.c",
        "if (++mtu->rounds < CL_MTU_ROUNDS)",
        "if (++mtu->rounds > 0)",
    ),
    Mutant(
        "put fragments together at the wrong place",
        "protocol/fragments.c",
        "memcpy(whole->bytes + place.start, bytes,",
        "memcpy(whole->bytes + (place.start ? length - (place.end - place.start) : 0), bytes,",
    ),
    Mutant(
        "send data over a paused path",
        "protocol/spray.c",
        "if (path->dead || !path->paused)",
        "if (path->dead || path->index < count)",
    ),
    Mutant(
        "keep the packets of a group that was closed",
        "protocol/ending.c",
        "    if (sequence == UINT32_MAX)\n        cl_closed_groups_add(&endpoint->closed, group, 0, UINT16_MAX);",
        "",
    ),
    Mutant(
        "visit a group that has left",
        "group/groups.c",
        "for (at = &groups->awake; group->awake; at",
        "for (at = &groups->awake; group->awake && groups->awake == NULL; at",
    ),
    Mutant(
        "remember two closed groups only",
        "protocol/closed_groups.h",
        "CL_CLOSED_GROUPS_MAX = 1024",
        "CL_CLOSED_GROUPS_MAX = 2",
    ),
    Mutant(
        "say that a lost peer lives",
        "protocol/revival.c",
        "return found->alive ? CL_OK : CL_EPEERLOST;",
        "return CL_OK;",
    ),
    Mutant(
        "go on without scratch memory",
        "plan/executor.c",
        "if (executor->scratch == NULL) {",
        "if (executor->scratch == NULL && block == NULL) {",
    ),
    Mutant(
        "take the want of memory for a bad plan",
        "plan/plan.c",
        "int status = CL_ENOMEM;",
        "int status = CL_EINVAL;",
    ),
    Mutant(
        "decode the blocks of another rank",
        "plan/executor.c",
        "return (struct cl_codec_place){cl_codec_key(executor->config.codec_key, encoder), step->block + n};",
        "return (struct cl_codec_place){cl_codec_key(executor->config.codec_key, encoder + n % 2), step->block};",
    ),
    Mutant(
        "round a NaN as if it were a number",
        "kernels/codec_template.h",
        "is_nan ? NAN_HALF : bf16_nearest(bits)",
        "is_nan && !bits ? NAN_HALF : bf16_nearest(bits)",
    ),
    Mutant(
        "wait for any source although nobody is left",
        "group/mailbox.c",
        "bool deserted = mailbox->queues != NULL;",
        "bool deserted = mailbox->queues != NULL && mailbox->size == 0;",
    ),
    Mutant(
        "blame oneself when nobody is left",
        "group/group.c",
        "return status == CL_EPEERLOST ? group->rank == 0 : UINT32_MAX;",
        "return status == CL_EPEERLOST ? group->rank : UINT32_MAX;",
    ),
    Mutant(
        "hold 4,096 messages at most",
        "protocol/index.c",
        "if (index->count >= index->bucket_count && !grow(index))",
        "if (index->count >= 4096 || (index->count >= index->bucket_count && !grow(index)))",
    ),
    Mutant(
        "start no more than a turn may",
        "group/group.c",
        "if (starts && progress->starts == 0)\n        progress->more = true;",
        "if (starts && progress->starts == 0)\n        progress->waits = true;",
    ),
    Mutant(
        "forget what finished beside an operation in flight",
        "protocol/history.c",
        "floor = oldest < floor ? oldest : floor;",
        "(void)oldest;",
    ),
    Mutant(
        "close gaps in which operations are in flight",
        "protocol/history.c",
        "if (next.start < end && !cl_signatures_any(in_flight, group->group, from, to))",
        "if (next.start < end && (from <= to || in_flight == NULL))",
    ),
    Mutant(
        "call the want of memory a mismatch",
        "plan/executor.c",
        "if (block == NULL)\n        return CL_ENOMEM;",
        "if (block == NULL)\n        return CL_EMISMATCH;",
    ),
    Mutant(
        "forget a lost packet for want of memory",
        "protocol/message.c",
        "|| cl_ranges_add(&send->lost, packet, (uint64_t)packet + 1);",
        "|| cl_ranges_add(&send->lost, packet, (uint64_t)packet + 1) || packet + 1 > 0;",
    ),
    Mutant(
        "keep what an eager message cost",
        "group/eager.c",
        "atomic_fetch_sub(&eager->bytes, length + CL_EAGER_COST_BYTES);",
        "atomic_fetch_sub(&eager->bytes, length);",
    ),
    Mutant(
        "nap for ten seconds",
        "group/nap.c",
        "return until_us - now_us < most_us ? until_us - now_us : most_us;",
        "return until_us - now_us < most_us ? 10000000 : 10000000;",
    ),
)


def build() -> str:
    """Builds the copy's simulator; returns what went wrong, if anything."""
    made = subprocess.run(["make", "-s", "build/test/simulate"], cwd=TREE, capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else made.stderr.strip().splitlines()[-1]


def simulate(seeds: int) -> str:
    """The first failure within so many seeds; empty when there is none."""
    command = [str(TREE / "build/test/simulate"), "--plans", str(PLANS), "--jobs", str(JOBS), "--failures", "1"]
    try:
        ran = subprocess.run(
            [*command, "--seeds", str(seeds)], capture_output=True, text=True, check=False, timeout=600
        )
    except subprocess.TimeoutExpired:
        return "FAILED: it does not end"
    failures = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
    return failures[0] if failures else ("" if ran.returncode == 0 else f"FAILED: status {ran.returncode}")


def main() -> int:
    words = sys.argv[1:]
    chosen = [
        mutant for mutant in MUTANTS if not words or any(word in f"{mutant.name} {mutant.file}" for word in words)
    ]
    shutil.rmtree(TREE, ignore_errors=True)  # of a run that was broken off, or with files that are gone
    shutil.copytree(ROOT / "native", TREE / "native")
    shutil.copy(ROOT / "Makefile", TREE)
    survivors = 0
    problem = build() or simulate(200)
    if problem:
        print(f"before any mutation: {problem}")
        return 1
    for mutant in chosen:
        path = TREE / "native" / mutant.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            verdict = f"STALE: {mutant.file} has its text {text.count(mutant.old)} times"
        else:
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            problem = build()
            verdict = f"DOES NOT BUILD: {problem}" if problem else simulate(SEEDS) or "SURVIVED"
            path.write_text(text, encoding="utf-8")
        survivors += not verdict.startswith("FAILED")
        print(f"{mutant.name:44} {verdict.removeprefix('FAILED: ')}", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - survivors} found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
