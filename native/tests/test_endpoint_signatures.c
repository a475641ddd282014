/* Endpoints whose operations carry signatures, over the network of network.h. */
#include "protocol/endpoint.h"
#include "protocol/signatures.h"

#include "tests/transfer.h"

/* Both sides of an operation, each with a signature of its own. The receiver calls first or last. */
static void disagree(uint16_t sender, uint16_t receiver, bool receiver_first, bool posts)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 18);
    SCOPED_TRANSFER *t = transfer_new(0, 1, 0, 20000);
    bool agree = !cl_signatures_differ(sender, receiver);
    for (int i = 0; i < 2; i++) {
        if ((i == 0) == receiver_first) {
            CHECK_EQ(cl_endpoint_begin(network->hosts[1].endpoint, 9, 1, receiver), CL_OK);
            if (posts && (agree || receiver_first))
                post_receive(network, t, 1);
        } else {
            CHECK_EQ(cl_endpoint_begin(network->hosts[0].endpoint, 9, 1, sender), CL_OK);
            post_send(network, t, 1, 0);
        }
        network_run_until(network, network_now_us(network) + 50000);
    }
    struct cl_closed_group aborted;
    bool failed = cl_endpoint_next_abort(network->hosts[1].endpoint, &aborted);
    CHECK_EQ(failed, !agree);
    if (failed) {
        CHECK_EQ(aborted.group, 9);
        CHECK_EQ(aborted.culprit, 0);
        CHECK_EQ(aborted.reason, CL_EMISMATCH);
    }
    cl_endpoint_end(network->hosts[1].endpoint, 9, 1);
}

TEST(test_signatures)
{
    for (int order = 0; order < 2; order++) {
        disagree(4095, 4095, order, true);
        disagree(5, 0, order, true);
        disagree(0, 5, order, true);
        disagree(5, 6, order, true);
        disagree(5, 6, order, false); /* no receive is posted for the message */
    }
}

/* Each host waits for the other, and neither sends. */
TEST(test_pings_carry_signatures)
{
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, ROOM, 20);
    uint8_t bytes[8];
    struct cl_sink sink = {bytes, NULL, NULL};
    for (uint16_t i = 0; i < 2; i++) {
        struct cl_endpoint *endpoint = network->hosts[i].endpoint;
        CHECK_EQ(cl_endpoint_begin(endpoint, 9, 1, (uint16_t)(5 + i)), CL_OK);
        CHECK_EQ(cl_endpoint_post_receive(endpoint, 1 - i, (struct cl_message_id){9, 1, 0}, sink, 8, &RELIABLE,
                                          network_now_us(network), NULL),
                 CL_OK);
        network_wake(network, i);
    }
    network_run_until(network, network_now_us(network) + 1500000); /* half of the time after which a peer is lost */
    for (uint16_t i = 0; i < 2; i++) {
        struct cl_closed_group aborted;
        CHECK(cl_endpoint_next_abort(network->hosts[i].endpoint, &aborted));
        CHECK_EQ(aborted.reason, CL_EMISMATCH);
        CHECK_EQ(aborted.culprit, 1 - i);
        cl_endpoint_end(network->hosts[i].endpoint, 9, 1);
    }
}
