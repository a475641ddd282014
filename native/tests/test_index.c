/* Indices: what a search looks at, counted. */
#include "protocol/index.h"

#include <stdlib.h>

#include "protocol/control.h"
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "protocol/signatures.h"
#include "protocol/table.h"
#include "tests/check.h"

enum { MANY = 32000, CHAIN_MOST = 12 /* of a random function with as many places as things, with room to spare */ };

struct thing {
    struct cl_index_place place;
    uint32_t number;
};

/* The most places that a search may have to look at. */
static uint32_t longest(const struct cl_index *index)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < index->bucket_count; i++) {
        uint32_t length = 0;
        for (const struct cl_index_place *place = index->buckets[i]; place != NULL; place = place->next)
            length++;
        most = length > most ? length : most;
    }
    return most;
}

TEST(test_equal_keys)
{
    SCOPED(cl_index_free) struct cl_index index = {0};
    struct thing things[300] = {0};
    CHECK(cl_index_find(&index, 7) == NULL);
    cl_index_remove(&index, &things[0].place); /* in no index */
    for (uint32_t i = 0; i < 300; i++) {
        things[i].number = i;
        CHECK(cl_index_add(&index, &things[i].place, cl_index_mix(i % 100)));
    }
    for (uint32_t key = 0; key < 100; key++) {
        struct cl_index_place *place = cl_index_find(&index, cl_index_mix(key));
        for (uint32_t i = 3; i-- > 0; place = cl_index_next(place)) /* the latest first, also after the index grew */
            CHECK_EQ(CL_INDEX_THING(place, struct thing, place)->number, 100 * i + key);
        CHECK(place == NULL);
    }
    for (uint32_t i = 100; i < 200; i++) {
        cl_index_remove(&index, &things[i].place);
        cl_index_remove(&index, &things[i].place); /* once is enough */
    }
    CHECK_EQ(index.count, 200);
    struct cl_index_place *place = cl_index_find(&index, cl_index_mix(42));
    CHECK(place == &things[242].place);
    CHECK(cl_index_next(place) == &things[42].place);
}

/* Operations follow one another: their names differ in few bits. */
TEST(test_many_operations_in_flight)
{
    SCOPED(cl_table_free) struct cl_table table = {0};
    SCOPED(cl_signatures_free) struct cl_signatures signatures = {0};
    SCOPED(cl_controls_free) struct cl_controls controls = {0};
    for (uint32_t i = 0; i < MANY; i++) {
        struct cl_message_id id = {.group = 1, .sequence = i};
        struct cl_control control = {.group = 1, .sequence = i};
        CHECK(cl_table_add_send(&table, 1, &id) != NULL);
        CHECK(cl_table_add_receive(&table, 1, &id) != NULL);
        CHECK(cl_signatures_add(&signatures, 1, i, 1));
        CHECK(cl_controls_push(&controls, CL_PACKET_READY, &control));
    }
    CHECK(longest(&table.names) <= CHAIN_MOST);
    CHECK(longest(&signatures.operations) <= CHAIN_MOST);
    CHECK(longest(&controls.contents) <= CHAIN_MOST);
}

TEST(test_many_messages_of_one_operation)
{
    SCOPED(cl_table_free) struct cl_table table = {0};
    for (uint32_t i = 0; i < MANY; i++) {
        struct cl_message_id id = {.group = 0x80000001u, .sequence = 7, .index = i / 100};
        CHECK(cl_table_add_receive(&table, (uint16_t)(i % 100), &id) != NULL);
    }
    CHECK(longest(&table.names) <= CHAIN_MOST);
}

/* A READY finds the messages of its operation, and looks at no others. */
TEST(test_many_held_messages)
{
    struct cl_peer *peer = cl_peer_create(1, 0, NULL, 1472);
    struct cl_send *sends = calloc(MANY, sizeof *sends);
    for (uint32_t i = 0; i < MANY; i++) {
        sends[i].message.id = (struct cl_message_id){.group = 1, .sequence = i / 2, .index = i % 2};
        cl_peer_hold(peer, &sends[i], 0);
    }
    CHECK(longest(&peer->held_operations) <= 2 * CHAIN_MOST);
    for (uint32_t i = 0; i < MANY; i++)
        cl_peer_unhold(peer, &sends[i]);
    CHECK_EQ(peer->held_operations.count, 0);
    CHECK(peer->held.first == NULL);
    cl_peer_destroy(peer);
    free(sends);
}
