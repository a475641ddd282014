#include "protocol/packet.h"

#include <string.h>

#include "tests/check.h"

static const struct cl_packet SAMPLE = {.kind = CL_PACKET_DATA,
                                        .flags = 5 | CL_PACKET_LAST,
                                        .source = 0x1234,
                                        .length = 8,
                                        .path = 7,
                                        .signature = 0xABC,
                                        .epoch = 0xABCD,
                                        .group = 0x01020304,
                                        .sequence = 0x05060708,
                                        .index = 0x090A0B0C,
                                        .offset = 0x0D0E0F10,
                                        .number = 0xFFFFFFFE};

/* The layout is a contract with the dissector and with other machines: byte for byte. */
TEST(test_layout)
{
    static const uint8_t EXPECTED[CL_PACKET_HEAD_BYTES] = {0x43, 0x4C, 0x40, 0x0D, 0x34, 0x12, 0x08, 0x00, 0x04, 0x03,
                                                           0x02, 0x01, 0x08, 0x07, 0x06, 0x05, 0x0C, 0x0B, 0x0A, 0x09,
                                                           0x10, 0x0F, 0x0E, 0x0D, 0xFE, 0xFF, 0xFF, 0xFF, 0xC7, 0xAB,
                                                           0xCD, 0xAB, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11};
    uint8_t head[CL_PACKET_HEAD_BYTES];
    cl_packet_encode(&SAMPLE, head);
    struct cl_seal seal = {.auth = CL_AUTH_OFF, .job = 0x1122334455667788u};
    cl_packet_seal(head, NULL, &seal, 0, 0);
    CHECK(memcmp(head, EXPECTED, sizeof(head)) == 0);
}

TEST(test_round_trip)
{
    uint8_t bytes[CL_PACKET_HEAD_BYTES + 8] = {0};
    struct cl_packet packet;
    cl_packet_encode(&SAMPLE, bytes);
    CHECK(cl_packet_decode(&packet, bytes, sizeof(bytes)));
    CHECK_EQ(packet.kind, SAMPLE.kind);
    CHECK_EQ(packet.flags, SAMPLE.flags);
    CHECK_EQ(packet.source, SAMPLE.source);
    CHECK_EQ(packet.length, SAMPLE.length);
    CHECK_EQ(packet.path, SAMPLE.path);
    CHECK_EQ(packet.signature, SAMPLE.signature);
    CHECK_EQ(packet.epoch, SAMPLE.epoch);
    CHECK_EQ(packet.group, SAMPLE.group);
    CHECK_EQ(packet.sequence, SAMPLE.sequence);
    CHECK_EQ(packet.index, SAMPLE.index);
    CHECK_EQ(packet.offset, SAMPLE.offset);
    CHECK_EQ(packet.number, SAMPLE.number);
}

TEST(test_decode_refuses)
{
    uint8_t good[CL_PACKET_HEAD_BYTES + 8] = {0}, bad[sizeof(good)];
    struct cl_packet packet;
    cl_packet_encode(&SAMPLE, good);
    for (size_t length = 0; length < sizeof(good); length++)
        CHECK(!cl_packet_decode(&packet, good, length));
    static const struct {
        size_t at;
        uint8_t value;
    } CHANGES[] = {{0, 0}, {1, 0}, {2, 0x10}, {2, 0x20 | CL_PACKET_KINDS}, {6, 7}, {7, 1}};
    for (size_t i = 0; i < sizeof(CHANGES) / sizeof(CHANGES[0]); i++) {
        memcpy(bad, good, sizeof(good));
        bad[CHANGES[i].at] = CHANGES[i].value;
        CHECK(!cl_packet_decode(&packet, bad, sizeof(bad)));
    }
}

TEST(test_seal_by_job)
{
    uint8_t bytes[CL_PACKET_HEAD_BYTES] = {0};
    struct cl_seal seal = {.auth = CL_AUTH_OFF, .job = 42}, other = {.auth = CL_AUTH_OFF, .job = 43};
    cl_packet_seal(bytes, NULL, &seal, 0, 0);
    CHECK(cl_packet_open(bytes, &seal, 0, 0));
    CHECK(!cl_packet_open(bytes, &other, 0, 0));
}

/* Whether the tag is still right after each bit of the packet was flipped in turn: expects it of `open` bytes. */
static void check_flips(const struct cl_packet *packet, enum cl_auth auth, size_t open)
{
    uint8_t bytes[CL_PACKET_HEAD_BYTES + 8] = {0};
    struct cl_seal seal = {.auth = auth, .key = {1, 2}};
    cl_packet_encode(packet, bytes);
    cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &seal, 3, 4);
    CHECK(cl_packet_open(bytes, &seal, 3, 4));
    size_t passed = 0;
    for (size_t bit = 0; bit < 8 * sizeof(bytes); bit++) {
        if (bit / 8 == 6 || bit / 8 == 7)
            continue; /* the length: cl_packet_decode looks at it first */
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
        passed += cl_packet_open(bytes, &seal, 3, 4);
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
    }
    CHECK_EQ(passed, 8 * open);
}

/* Each bit of a long payload, and of its last, shorter block. */
TEST(test_seal_covers_long_payloads)
{
    static uint8_t bytes[CL_PACKET_HEAD_BYTES + 3 * CL_NH_BLOCK_BYTES];
    static struct cl_nh_key nh;
    static const uint16_t LENGTHS[] = {65, 1000, 1024, 1025, 2049, 3072};
    struct cl_seal seal = {.auth = CL_AUTH_FULL, .key = {1, 2}, .nh = &nh};
    cl_packet_expand_key(&nh, &seal.key);
    for (size_t i = 0; i < sizeof(LENGTHS) / sizeof(*LENGTHS); i++) {
        struct cl_packet packet = SAMPLE;
        packet.length = LENGTHS[i];
        for (size_t at = 0; at < LENGTHS[i]; at++)
            bytes[CL_PACKET_HEAD_BYTES + at] = (uint8_t)(at * 37);
        cl_packet_encode(&packet, bytes);
        cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &seal, 3, 4);
        CHECK(cl_packet_open(bytes, &seal, 3, 4));
        size_t passed = 0;
        for (size_t bit = 8 * CL_PACKET_HEAD_BYTES; bit < 8 * (CL_PACKET_HEAD_BYTES + (size_t)LENGTHS[i]); bit++) {
            bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
            passed += cl_packet_open(bytes, &seal, 3, 4);
            bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ 1u << bit % 8);
        }
        CHECK_EQ(passed, 0);
        struct cl_seal headers = seal;
        headers.auth = CL_AUTH_HEADER;
        CHECK(!cl_packet_open(bytes, &headers, 3, 4));
    }
}

/* Blocks that change places change the tag, and so does a zero at the end. */
TEST(test_seal_binds_the_order_and_length_of_blocks)
{
    static uint8_t bytes[CL_PACKET_HEAD_BYTES + 2 * CL_NH_BLOCK_BYTES], other[sizeof(bytes)];
    static struct cl_nh_key nh;
    struct cl_seal seal = {.auth = CL_AUTH_FULL, .key = {1, 2}, .nh = &nh};
    cl_packet_expand_key(&nh, &seal.key);
    struct cl_packet packet = SAMPLE;
    packet.length = 2 * CL_NH_BLOCK_BYTES;
    memset(bytes + CL_PACKET_HEAD_BYTES, 1, CL_NH_BLOCK_BYTES);
    memset(other + CL_PACKET_HEAD_BYTES + CL_NH_BLOCK_BYTES, 1, CL_NH_BLOCK_BYTES);
    cl_packet_encode(&packet, bytes);
    cl_packet_encode(&packet, other);
    cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &seal, 3, 4);
    cl_packet_seal(other, other + CL_PACKET_HEAD_BYTES, &seal, 3, 4);
    CHECK(memcmp(bytes + 32, other + 32, 8) != 0);
    packet.length = 100;
    cl_packet_encode(&packet, other);
    cl_packet_seal(other, bytes + CL_PACKET_HEAD_BYTES, &seal, 3, 4);
    uint64_t tag = cl_load_u64(other + 32);
    packet.length = 101;
    cl_packet_encode(&packet, other);
    bytes[CL_PACKET_HEAD_BYTES + 100] = 0;
    cl_packet_seal(other, bytes + CL_PACKET_HEAD_BYTES, &seal, 3, 4);
    CHECK(cl_load_u64(other + 32) != tag);
}

TEST(test_seal_covers)
{
    struct cl_packet packet = SAMPLE;
    for (packet.kind = 0; packet.kind < CL_PACKET_KINDS; packet.kind++) {
        check_flips(&packet, CL_AUTH_HEADER, packet.kind == CL_PACKET_DATA ? 8 : 0);
        check_flips(&packet, CL_AUTH_FULL, 0);
    }
}

TEST(test_seal_binds)
{
    uint8_t bytes[CL_PACKET_HEAD_BYTES + 8] = {0};
    struct cl_seal seal = {.auth = CL_AUTH_FULL, .key = {1, 2}}, other = seal;
    cl_packet_encode(&SAMPLE, bytes);
    cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &seal, 3, 0x5FFFFFFFE);
    CHECK(cl_packet_open(bytes, &seal, 3, 0x5FFFFFFFE));
    CHECK(!cl_packet_open(bytes, &seal, 4, 0x5FFFFFFFE)); /* for another rank */
    CHECK(!cl_packet_open(bytes, &seal, 3, 0x6FFFFFFFE)); /* once the numbers have wrapped */
    other.key.k1 = 3;
    CHECK(!cl_packet_open(bytes, &other, 3, 0x5FFFFFFFE)); /* of another job */
    other = seal;
    other.auth = CL_AUTH_HEADER;
    CHECK(!cl_packet_open(bytes, &other, 3, 0x5FFFFFFFE));
}

/* The tag is part of the wire format, too: fixed by this one, which was computed with OpenSSL. */
TEST(test_seal_layout)
{
    uint8_t bytes[CL_PACKET_HEAD_BYTES + 8] = {0}, key[CL_SIPHASH_KEY_BYTES];
    for (uint8_t i = 0; i < sizeof(key); i++)
        key[i] = i;
    struct cl_seal seal = {.auth = CL_AUTH_FULL, .key = cl_siphash_key(key)};
    cl_packet_encode(&SAMPLE, bytes);
    memcpy(bytes + CL_PACKET_HEAD_BYTES, "payload!", 8);
    cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &seal, 0x0203, 0x5FFFFFFFE);
    static const uint8_t TAG[8] = {0x6F, 0x1A, 0x71, 0xC1, 0xB3, 0xEC, 0xB3, 0x96};
    CHECK(memcmp(bytes + 32, TAG, sizeof(TAG)) == 0);
}

TEST(test_payload_bytes)
{
    CHECK_EQ(cl_packet_payload_bytes(1472), 1432);
    CHECK_EQ(cl_packet_payload_bytes(1479), 1432);
    CHECK_EQ(cl_packet_payload_bytes(1480), 1440);
}

TEST(test_numbers_wrap)
{
    static const struct {
        uint64_t near;
        uint32_t low;
        uint64_t expected;
    } CASES[] = {{0, 0, 0},
                 {0, 5, 5},
                 {100, 90, 90},
                 {0xFFFFFFFF, 1, 0x100000001},
                 {0x100000001, 0xFFFFFFFF, 0xFFFFFFFF},
                 {0x5FFFFFFF0, 3, 0x600000003},
                 {10, 0xFFFFFFF0, 0xFFFFFFF0}}; /* never below zero */
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++)
        CHECK_EQ(cl_packet_number(CASES[i].near, CASES[i].low), CASES[i].expected);
}
