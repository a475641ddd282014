#include "protocol/packet.h"

enum { LENGTH_AT = 6, TAG_AT = 32 };

#define NH_LABEL 0x79656B2D686E2D6Cu /* "l-nh-key" */

uint32_t cl_packet_payload_bytes(uint32_t datagram_bytes)
{
    return (datagram_bytes - CL_PACKET_HEAD_BYTES) & ~(uint32_t)7;
}

void cl_packet_encode(const struct cl_packet *packet, uint8_t *head)
{
    cl_store_u16(head, CL_PACKET_MAGIC);
    head[2] = (uint8_t)(CL_PACKET_VERSION << 4 | packet->kind);
    head[3] = packet->flags;
    cl_store_u16(head + 4, packet->source);
    cl_store_u16(head + 6, packet->length);
    cl_store_u32(head + 8, packet->group);
    cl_store_u32(head + 12, packet->sequence);
    cl_store_u32(head + 16, packet->index);
    cl_store_u32(head + 20, packet->offset);
    cl_store_u32(head + 24, packet->number);
    cl_store_u16(head + 28, (uint32_t)packet->path | (uint32_t)packet->signature << 4);
    cl_store_u16(head + 30, packet->epoch);
}

bool cl_packet_decode(struct cl_packet *packet, const uint8_t *bytes, size_t length)
{
    if (length < CL_PACKET_HEAD_BYTES || cl_load_u16(bytes) != CL_PACKET_MAGIC || bytes[2] >> 4 != CL_PACKET_VERSION)
        return false;
    *packet = (struct cl_packet){.kind = cl_packet_kind(bytes),
                                 .flags = bytes[3],
                                 .source = cl_load_u16(bytes + 4),
                                 .length = cl_load_u16(bytes + 6),
                                 .group = cl_load_u32(bytes + 8),
                                 .sequence = cl_load_u32(bytes + 12),
                                 .index = cl_load_u32(bytes + 16),
                                 .offset = cl_load_u32(bytes + 20),
                                 .number = cl_load_u32(bytes + 24),
                                 .path = cl_load_u16(bytes + 28) & 0x0F,
                                 .signature = (uint16_t)(cl_load_u16(bytes + 28) >> 4),
                                 .epoch = cl_load_u16(bytes + 30)};
    return packet->kind < CL_PACKET_KINDS && packet->length == length - CL_PACKET_HEAD_BYTES;
}

void cl_packet_expand_key(struct cl_nh_key *nh, const struct cl_siphash_key *key)
{
    for (uint32_t i = 0; i < CL_NH_BLOCK_WORDS; i++) { /* two words at a time, of both keys */
        struct cl_siphash hash;
        cl_siphash_begin(&hash, key);
        cl_siphash_word(&hash, NH_LABEL);
        cl_siphash_word(&hash, i);
        uint64_t words = cl_siphash_finish(&hash, hash.length << 56);
        uint32_t *target = &nh->words[i / (CL_NH_BLOCK_WORDS / 2)][2 * i % CL_NH_BLOCK_WORDS];
        target[0] = (uint32_t)words;
        target[1] = (uint32_t)(words >> 32);
    }
}

/* Adds the payload to the hash, and returns the tag. */
static uint64_t tag_with(struct cl_siphash hash, const uint8_t *payload, size_t length, const struct cl_nh_key *nh)
{
    if (length <= CL_PACKET_DIRECT_BYTES || nh == NULL) {
        struct cl_siphash rest = hash; /* a copy to take the address of: `hash` stays in registers */
        return cl_siphash_end(&rest, payload, length);
    }
    for (size_t at = 0; at < length; at += CL_NH_BLOCK_BYTES) {
        uint64_t sums[2];
        cl_nh(sums, payload + at, length - at < CL_NH_BLOCK_BYTES ? length - at : CL_NH_BLOCK_BYTES, nh);
        cl_siphash_word(&hash, sums[0]);
        cl_siphash_word(&hash, sums[1]);
    }
    return cl_siphash_finish(&hash, hash.length << 56);
}

static uint64_t tag_of(const uint8_t *head, const uint8_t *payload, const struct cl_seal *seal, uint16_t destination,
                       uint64_t number)
{
    if (seal->auth == CL_AUTH_OFF)
        return seal->job;
    bool bare = seal->auth == CL_AUTH_HEADER && cl_packet_kind(head) == CL_PACKET_DATA;
    struct cl_siphash hash;
    cl_siphash_begin(&hash, &seal->key);
    for (int at = 0; at < TAG_AT; at += 8)
        cl_siphash_word(&hash, cl_load_u64(head + at));
    cl_siphash_word(&hash, number >> 32 | (uint64_t)destination << 32 | (uint64_t)seal->auth << 48);
    if (bare)
        return cl_siphash_finish(&hash, hash.length << 56);
    return tag_with(hash, payload, cl_load_u16(head + LENGTH_AT), seal->nh);
}

void cl_packet_seal(uint8_t *head, const uint8_t *payload, const struct cl_seal *seal, uint16_t destination,
                    uint64_t number)
{
    uint64_t tag = tag_of(head, payload, seal, destination, number);
    cl_store_u32(head + TAG_AT, (uint32_t)tag);
    cl_store_u32(head + TAG_AT + 4, (uint32_t)(tag >> 32));
}

bool cl_packet_open(const uint8_t *bytes, const struct cl_seal *seal, uint16_t destination, uint64_t number)
{
    /* one comparison of whole words: its time does not reveal how many bytes of a forged tag are right */
    return (cl_load_u64(bytes + TAG_AT) ^ tag_of(bytes, bytes + CL_PACKET_HEAD_BYTES, seal, destination, number)) == 0;
}
