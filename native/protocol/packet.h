/*
 * Packet: the fixed 40-byte little-endian header that starts every datagram. Every byte here costs goodput.
 *
 *    0 u16 magic          8 u32 group       24 u32 number   per path and direction, wraps
 *    2 u8  version, kind 12 u32 sequence    28 u16 path (4 bits), signature (12 bits: signatures.h)
 *    3 u8  flags         16 u32 index       30 u16 epoch
 *    4 u16 source        20 u32 offset      32 u64 tag
 *    6 u16 length        of what follows the header          the tag: see cl_packet_seal
 *
 * DATA uses the fields by their names; offset is the packet's place in its message times the payload of a full packet,
 * also where packets of encoded values are shorter. The other kinds use them as follows; cl_control_read and
 * cl_ack_read give the names back:
 *   ACK       number = largest received, path = the path acknowledged, sequence = receive time of the largest
 *             (receiver's clock, low 32 bits, us), index = host delay in us, group = the n-th acknowledgement of
 *             this path, by which replays are known, signature = marked packets; the rest follows (see ack.h)
 *   PING      asks for an acknowledgement; (group, sequence) and signature are those of an operation in flight, if any;
 *             payload: padding, where it tries a size (mtu.h)
 *   READY     the sender may send refused messages of (group, sequence) again
 *   ABORT     group, offset = the reason (an enum cl_error), index = the culprit + 1, or 0
 *   MISMATCH  (group, sequence, index) has another length, or another loss bound, at the receiver
 *   PROBE     every packet of (group, sequence, index) has been sent once; payload: see partial.h
 *   REQUEST   (group, sequence, index) is ready to be sent; offset = packets that leave without credit; signature as
 *             that of DATA
 *   GRANT     the packets of (group, sequence, index) before number `offset` may be sent
 *   STOP      the receiver has ended (group, sequence, index); offset = the first packet reported; payload: a bit per
 *             packet from there on, set if the packet was not counted; empty if every packet of the message was counted
 *   FRAGMENT  a part of the packet with this number, header included: offset = where it begins, index = length of the
 *             whole: see fragments.h
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "commlayer.h"
#include "kernels/nh.h"
#include "protocol/bytes.h"
#include "protocol/siphash.h"

enum {
    CL_PACKET_HEAD_BYTES = 40,
    CL_PACKET_MAGIC = 0x4C43,
    CL_PACKET_VERSION = 4,
    CL_PACKET_DIRECT_BYTES =
        64, /* SipHash alone covers payloads up to this length, and the sums (nh.h) of longer ones */
};

enum cl_packet_kind {
    CL_PACKET_DATA = 0,
    CL_PACKET_ACK = 1,
    CL_PACKET_PING = 2,
    CL_PACKET_READY = 3,
    CL_PACKET_ABORT = 4,
    CL_PACKET_MISMATCH = 5,
    CL_PACKET_PROBE = 6,
    CL_PACKET_STOP = 7,
    CL_PACKET_FRAGMENT = 8,
    CL_PACKET_REQUEST = 9,
    CL_PACKET_GRANT = 10,
    CL_PACKET_KINDS = 11,
};

/* flags; the low three bits are the priority */
enum {
    CL_PACKET_PRIORITY = 0x07,
    CL_PACKET_LAST = 0x08,    /* ends its message: tells the receiver the sender's length */
    CL_PACKET_ACK_NOW = 0x10, /* the sender wants an acknowledgement without delay */
    /* flags of partial messages */
    CL_PACKET_DROPPABLE = 0x20, /* this packet may be lost */
    CL_PACKET_TAIL = 0x40,      /* with this packet, every packet has been sent once; implies SAFE */
    CL_PACKET_SAFE = 0x80,      /* every protected packet has been acknowledged */
};

struct cl_packet {
    uint8_t kind;
    uint8_t flags;
    uint16_t source;
    uint16_t length;
    uint16_t path;
    uint16_t signature; /* DATA, PING: 0 is not compared; ACK: see ack.h */
    uint16_t epoch;
    uint32_t group;
    uint32_t sequence;
    uint32_t index;
    uint32_t offset;
    uint32_t number;
};

/* Payload bytes of a full DATA packet: whole 8-byte elements, so that no element is ever split. */
uint32_t cl_packet_payload_bytes(uint32_t datagram_bytes);

/* The kind of an encoded packet: an enum cl_packet_kind, or a number that is none. */
static inline uint8_t cl_packet_kind(const uint8_t *head)
{
    return head[2] & 0x0F;
}

/* FRAGMENT: the length of the packet of which it is a part. */
static inline uint32_t cl_packet_whole_length(const struct cl_packet *packet)
{
    return packet->index;
}

/* Writes everything but the tag. */
void cl_packet_encode(const struct cl_packet *packet, uint8_t *head);

/* False when the bytes are no packet of this protocol: too short, or wrong magic, version, kind or length. The tag is
 * not checked. */
bool cl_packet_decode(struct cl_packet *packet, const uint8_t *bytes, size_t length);

/* The secret that authenticates packets: of a job, or of two processes. */
struct cl_seal {
    enum cl_auth auth;
    uint64_t job; /* the tag itself with CL_AUTH_OFF */
    struct cl_siphash_key key;
    const struct cl_nh_key *nh; /* shared by all seals of an endpoint; NULL: SipHash covers payloads of any length */
};

/* Draws the key of nh.h from the job's key: SipHash of the n-th number makes its n-th two words. */
void cl_packet_expand_key(struct cl_nh_key *nh, const struct cl_siphash_key *key);

/* Writes the tag, which binds a packet to its job, its receiver and its number. It is SipHash-2-4 of the header before
 * the tag; of {u32 upper half of the number, u16 destination, u16 auth}, which both sides know; and of the bytes after
 * the header, or if these are more than CL_PACKET_DIRECT_BYTES, of the two sums of each of their blocks. With
 * CL_AUTH_HEADER the payload of DATA packets is left out, but not that of other kinds. For an ACK, the number is that
 * of the acknowledgement itself. The header must have been encoded.
 *
 * That is a universal hash, then a pseudorandom function (Carter and Wegman, 1981): an attacker who knows neither key
 * makes a right tag by chance only, 2^-64 for the sums and 2^-64 for SipHash, also if packet numbers came twice. */
void cl_packet_seal(uint8_t *head, const uint8_t *payload, const struct cl_seal *seal, uint16_t destination,
                    uint64_t number);
/* Whether the tag of a packet that cl_packet_decode has accepted is right. */
bool cl_packet_open(const uint8_t *bytes, const struct cl_seal *seal, uint16_t destination, uint64_t number);

/* The 64-bit number nearest to `near` whose low half is `low`: numbers wrap in packets, but not in memory. */
static inline uint64_t cl_packet_number(uint64_t near, uint32_t low)
{
    int64_t distance = (int32_t)(low - (uint32_t)near);
    return distance < 0 && (uint64_t)-distance > near ? low : near + (uint64_t)distance;
}
