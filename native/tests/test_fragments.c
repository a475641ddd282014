#include "protocol/fragments.h"

#include <string.h>

#include "protocol/datagram.h"
#include "protocol/mtu.h"
#include "protocol/packet.h"
#include "tests/check.h"

enum { LENGTH = 8972, LIMIT = 1200 };

TEST(test_every_byte_is_in_one_fragment)
{
    static const uint32_t LENGTHS[] = {600, 1200, 1201, 1472, 8972, 65000};
    for (uint32_t i = 0; i < sizeof LENGTHS / sizeof *LENGTHS; i++) {
        struct cl_mtu mtu;
        cl_mtu_init(&mtu, LENGTHS[i]);
        for (uint32_t limit = mtu.least; limit <= LENGTHS[i]; limit += 97) {
            uint32_t count = cl_fragments_count(LENGTHS[i], limit), at = 0;
            CHECK(count <= CL_MTU_FRAGMENTS_MAX);
            for (uint32_t n = 0; n < count && count > 1; n++) {
                uint32_t end = cl_fragments_end(LENGTHS[i], limit, at);
                CHECK(end > at);
                CHECK(CL_PACKET_HEAD_BYTES + end - at <= limit);
                CHECK(n > 0 || CL_PACKET_HEAD_BYTES + end <= CL_HEAD_BYTES_MAX);
                at = end;
            }
            CHECK(at == LENGTHS[i] || count == 1);
        }
        CHECK_EQ(cl_fragments_count(LENGTHS[i], LENGTHS[i]), 1);
    }
}

static uint8_t data[LENGTH];

static const struct cl_whole *put(struct cl_fragments *fragments, uint64_t number, uint32_t start, uint32_t end)
{
    return cl_fragments_put(fragments, number, LENGTH, (struct cl_range){start, end}, data + start, start == 0);
}

/* The fragments come in any order, and some of them twice. */
TEST(test_whole)
{
    SCOPED(cl_fragments_free) struct cl_fragments fragments = {0};
    for (uint32_t i = 0; i < LENGTH; i++)
        data[i] = (uint8_t)(i * 31 + (i >> 8));
    for (uint64_t number = 0; number < 20; number++) {
        CHECK(put(&fragments, number, 3000, 6000) == NULL);
        CHECK(put(&fragments, number, 3000, 6000) == NULL);
        CHECK(put(&fragments, number, 6000, LENGTH) == NULL);
        const struct cl_whole *whole = put(&fragments, number, 0, 3000);
        CHECK(whole != NULL && memcmp(whole->bytes, data, LENGTH) == 0);
        CHECK(whole != NULL && whole->marked);
    }
}

/* Wholes that never become complete give way to new ones, the oldest first. */
TEST(test_incomplete)
{
    SCOPED(cl_fragments_free) struct cl_fragments fragments = {0};
    for (uint64_t number = 0; number < 100; number++)
        CHECK(put(&fragments, number, 0, 3000) == NULL);
    CHECK(put(&fragments, 0, 3000, LENGTH) == NULL);
    for (uint64_t number = 99; number > 100 - CL_FRAGMENTS_WHOLES; number--)
        CHECK(put(&fragments, number, 3000, LENGTH) != NULL);
}
