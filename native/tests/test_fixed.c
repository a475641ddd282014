/* The fixed rate control, and whole endpoints that were opened with it: a second control can take the place of the
 * first. */
#include "congestion/fixed.h"

#include "congestion/congestion.h"
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "tests/check.h"
#include "tests/network.h"

enum { BYTES = 1472, MIB = 1 << 20 };

static uint8_t data[MIB], target[MIB];

TEST(test_find)
{
    CHECK(cl_congestion_find(NULL) == &cl_rate_control_delay);
    CHECK(cl_congestion_find("delay") == &cl_rate_control_delay);
    CHECK(cl_congestion_find("fixed") == &cl_rate_control_fixed);
    CHECK(cl_congestion_find("") == NULL && cl_congestion_find("bbr") == NULL);
}

TEST(test_unknown_name)
{
    struct cl_endpoint_config config = {.auth = CL_AUTH_OFF, .datagram_bytes = BYTES, .rate_control = "bbr"};
    struct cl_endpoint *endpoint;
    CHECK_EQ(cl_endpoint_create(&config, &endpoint), CL_EINVAL);
}

/* Whatever happens, the same window, and no packet waits for a pacer. */
TEST(test_nothing_changes_it)
{
    static struct cl_congestion_nic nic;
    static struct cl_congestion path;
    cl_congestion_nic_init(&nic, &cl_rate_control_fixed, BYTES);
    cl_congestion_init(&path, &nic, BYTES);
    uint64_t window = (uint64_t)CL_FIXED_WINDOW_PACKETS * BYTES;
    for (uint32_t i = 0; i < 1000; i++) {
        CHECK_EQ(cl_congestion_report(&path).window_bytes, window);
        CHECK(cl_congestion_has_room(
            &path, 4, &(struct cl_congestion_flight){window - BYTES, window - BYTES, window - BYTES}, BYTES));
        CHECK(!cl_congestion_has_room(
            &path, 4, &(struct cl_congestion_flight){window - BYTES + 1, window - BYTES + 1, window}, BYTES));
        CHECK_EQ(cl_congestion_ready_us(&path, 4, i), i);
        CHECK_EQ(cl_congestion_nic_ready_us(&nic, 4, i), i);
        cl_congestion_sent(&path, 4, 4, BYTES, i);
        cl_congestion_sent_control(&path, BYTES);
        cl_congestion_lost(&path, 1);
        cl_congestion_timeout(&path, i);
        cl_congestion_received(&path, BYTES, i);
        cl_congestion_acknowledged(
            &path,
            &(struct cl_congestion_ack){.bytes = BYTES,
                                        .packets = 1,
                                        .marked = 1,
                                        .largest = i,
                                        .next = i + 1,
                                        .limited = true,
                                        .timing = {.known = true, .sent_us = i, .queue_us = 50000, .base_us = 100}},
            i);
    }
    CHECK_EQ(cl_congestion_delay_us(&path), 0);
    CHECK_EQ(cl_congestion_report(&path).carried_bytes, 2000 * (BYTES + CL_CONGESTION_OVERHEAD_BYTES));
    cl_congestion_leave(&path);
}

struct outcome {
    uint64_t us, overflows, most_in_flight;
};

/* Three hosts send 1 MiB each to the fourth, whose port has this buffer. */
static struct outcome incast(const char *rate_control, uint32_t buffer_packets)
{
    SCOPED_NETWORK *network = network_new_with(rate_control, 4, 1, 200, 2000, 64 << 20, 1);
    network_set_link(network_ingress(network, 0, 0), 200, buffer_packets);
    for (uint16_t from = 1; from < 4; from++)
        network_post(network, (struct network_message){from, 0, {1, 1, 0}, data, target, MIB, RELIABLE});
    uint64_t start_us = network_now_us(network);
    struct outcome outcome = {0};
    while (network->hosts[0].completed < 3 && network_step(network, start_us + 60000000)) {
        const struct cl_path *path = &cl_peer_list_find(&network->hosts[1].endpoint->peers, 0)->paths[0];
        outcome.most_in_flight = path->sent.bytes > outcome.most_in_flight ? path->sent.bytes : outcome.most_in_flight;
    }
    CHECK_EQ(network->hosts[0].completed, 3);
    outcome.us = network_now_us(network) - start_us;
    outcome.overflows = network_overflows(network);
    return outcome;
}

/* The window is what is in flight. Three of them fit in a deep buffer; in a shallow one they overflow to the end, where
 * the product's control stops that. */
TEST(test_incast_with_either_control)
{
    struct outcome fixed = incast("fixed", 200), shallow = incast("fixed", 24), delay = incast("delay", 24);
    printf("   incast, fixed: %.1f ms; 24 packets of buffer, fixed: %.1f ms, %u lost, delay: %.1f ms, %u lost\n",
           (double)fixed.us / 1e3, (double)shallow.us / 1e3, (unsigned)shallow.overflows, (double)delay.us / 1e3,
           (unsigned)delay.overflows);
    CHECK_EQ(fixed.overflows, 0);
    CHECK(fixed.most_in_flight > (CL_FIXED_WINDOW_PACKETS - 1) * BYTES);
    CHECK(fixed.most_in_flight <= (CL_FIXED_WINDOW_PACKETS + 1) * BYTES); /* and a PING */
    CHECK(shallow.overflows > 0 && delay.overflows > 0);
    CHECK(delay.overflows < shallow.overflows / 2);
}
