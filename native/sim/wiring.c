#include "sim/wiring.h"

#include <string.h>

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "protocol/packet.h"
#include "sim/memory.h"
#include "sim/random.h"

enum { STREAM = 4, DATAGRAM_BYTES_LEAST = 200, FACTOR_MOST = 4 /* between the largest datagrams of two ranks */ };

void sim_wiring_draw(struct sim_wiring *wiring, uint64_t seed, uint32_t world, uint32_t datagram_bytes, bool plain)
{
    struct sim_random random = sim_random_seeded(seed, STREAM);
    *wiring = (struct sim_wiring){.datagram_bytes = sim_new(world, sizeof *wiring->datagram_bytes),
                                  .credit_bytes = sim_new(world, sizeof *wiring->credit_bytes)};
    uint32_t least =
        datagram_bytes / FACTOR_MOST > DATAGRAM_BYTES_LEAST ? datagram_bytes / FACTOR_MOST : DATAGRAM_BYTES_LEAST;
    bool unequal = !plain && sim_random_chance(&random, 0.25);
    for (uint32_t i = 0; i < world; i++) {
        bool smaller = unequal && sim_random_chance(&random, 0.5);
        wiring->datagram_bytes[i] =
            smaller ? (uint32_t)sim_random_between(&random, least, datagram_bytes) : datagram_bytes;
    }
    if (plain)
        return;
    wiring->keys = sim_random_chance(&random, 0.2);
    if (sim_random_chance(&random, 0.2)) /* the low half wraps after up to some thousand packets */
        wiring->first_number = (sim_random_between(&random, 1, 3) << 32) - (uint64_t)sim_random_scale(&random, 1, 5000);
    if (sim_random_chance(&random, 0.2)) {
        wiring->mark = sim_random_scale(&random, 0.02, 1);
        wiring->drops = sim_random_chance(&random, 0.5);
    }
    if (!sim_random_chance(&random, 0.4))
        return;
    if (sim_random_chance(&random, 0.5))
        wiring->unscheduled_bytes = (uint32_t)sim_random_scale(&random, datagram_bytes, 1e5);
    uint64_t budget = (uint64_t)sim_random_scale(&random, datagram_bytes, 1e6);
    bool all = sim_random_chance(&random, 0.7);
    for (uint32_t i = 0; i < world; i++)
        wiring->credit_bytes[i] = all || sim_random_chance(&random, 0.5) ? budget : 0;
    bool derived = sim_random_chance(&random, 0.3);
    for (uint32_t i = 0; derived && i < world; i++)
        wiring->credit_bytes[i] = wiring->credit_bytes[i] > 0 ? CL_CREDIT_DERIVED : 0;
}

void sim_wiring_free(struct sim_wiring *wiring)
{
    free(wiring->datagram_bytes);
    free(wiring->credit_bytes);
}

uint32_t sim_wiring_datagram_bytes(const struct sim_wiring *wiring, uint32_t a, uint32_t b)
{
    uint32_t bytes_a = wiring->datagram_bytes[a], bytes_b = wiring->datagram_bytes[b];
    return bytes_a < bytes_b ? bytes_a : bytes_b;
}

/* Counts as if that many packets had left and arrived on the path already. */
static void count_from(struct cl_path *path, uint64_t number)
{
    path->sent.low = path->sent.next = path->packets.next = number;
    path->ack.written = path->acks.next = number;
}

bool sim_wiring_set_up(const struct sim_wiring *wiring, uint64_t seed, struct cl_endpoint *endpoint, uint16_t self,
                       uint16_t peer)
{
    uint32_t bytes = sim_wiring_datagram_bytes(wiring, self, peer);
    bool equal = wiring->datagram_bytes[self] == wiring->datagram_bytes[peer];
    bool good = equal || cl_endpoint_cut_peer(endpoint, peer, cl_packet_payload_bytes(bytes)) == CL_OK;
    if (wiring->keys) {
        uint64_t pair = self < peer ? (uint64_t)self << 16 | peer : (uint64_t)peer << 16 | self;
        uint64_t secret[2] = {sim_mix(seed ^ sim_mix(pair)), sim_mix(pair ^ sim_mix(seed))};
        uint8_t key[16];
        memcpy(key, secret, sizeof key);
        good = good && cl_endpoint_key_peer(endpoint, peer, key) == CL_OK;
    }
    if (wiring->credit_bytes[peer] > 0)
        good = good && cl_endpoint_credit_peer(endpoint, peer, wiring->unscheduled_bytes) == CL_OK;
    struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    for (uint16_t i = 0; wiring->first_number > 0 && i < known->path_count; i++)
        count_from(&known->paths[i], wiring->first_number);
    return good;
}

void sim_wiring_print(const struct sim_wiring *wiring, uint32_t world, FILE *file)
{
    if (wiring->keys)
        fputs("  a key for each pair of ranks\n", file);
    if (wiring->first_number > 0)
        fprintf(file, "  packet numbers begin at %#llx\n", (unsigned long long)wiring->first_number);
    for (uint32_t i = 0, granting = 0; i < world; i++) {
        granting += wiring->credit_bytes[i] > 0;
        if (granting > 0 && i + 1 == world)
            fprintf(file, "  %u ranks grant credit, with %u bytes of each message unscheduled\n", granting,
                    wiring->unscheduled_bytes);
    }
    if (wiring->mark > 0)
        fprintf(file, "  switches mark above %.3g of their queues%s\n", wiring->mark,
                wiring->drops ? ", and drop what may be lost" : "");
    for (uint32_t i = 0, j = 0; i < world; i++)
        if (sim_wiring_datagram_bytes(wiring, i, i) != sim_wiring_datagram_bytes(wiring, j, j) || i + 1 == world) {
            fprintf(file, "  ranks %u to %u: datagrams of %u bytes\n", j, i + 1 == world ? i : i - 1,
                    wiring->datagram_bytes[j]);
            j = i;
        }
}
