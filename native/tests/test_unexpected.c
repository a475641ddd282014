#include "protocol/unexpected.h"

#include <string.h>

#include "tests/check.h"

TEST(test_order_and_contents)
{
    SCOPED(cl_unexpected_free) struct cl_unexpected unexpected;
    struct cl_unexpected_chain chain = {0};
    cl_unexpected_init(&unexpected, 1 << 20, 64);
    CHECK(cl_unexpected_put(&unexpected, &chain, 640, 0, (const uint8_t *)"abcdefgh", 8));
    CHECK(cl_unexpected_put(&unexpected, &chain, 0, 8, (const uint8_t *)"xyz", 3));
    struct cl_unexpected_packet *packet = cl_unexpected_take(&chain);
    CHECK_EQ(packet->offset, 640);
    CHECK_EQ(packet->flags, 0);
    CHECK(memcmp(packet->payload, "abcdefgh", 8) == 0);
    cl_unexpected_release(&unexpected, packet);
    packet = cl_unexpected_take(&chain);
    CHECK_EQ(packet->length, 3);
    CHECK_EQ(packet->flags, 8);
    cl_unexpected_release(&unexpected, packet);
    CHECK(cl_unexpected_take(&chain) == NULL);
    CHECK_EQ(unexpected.used_bytes, 0);
}

TEST(test_limit)
{
    SCOPED(cl_unexpected_free) struct cl_unexpected unexpected;
    struct cl_unexpected_chain one = {0}, other = {0};
    cl_unexpected_init(&unexpected, 1000, 64);
    uint32_t fit = 0;
    while (cl_unexpected_put(&unexpected, fit % 2 ? &one : &other, 0, 0, (const uint8_t *)"12345678", 8))
        fit++;
    CHECK(unexpected.used_bytes <= 1000);
    CHECK_EQ(fit, 1000 / (sizeof(struct cl_unexpected_packet) + 64));
    cl_unexpected_drop(&unexpected, &one);
    CHECK(cl_unexpected_put(&unexpected, &other, 0, 0, (const uint8_t *)"12345678", 8));
    cl_unexpected_drop(&unexpected, &other);
    CHECK_EQ(unexpected.used_bytes, 0);
}
