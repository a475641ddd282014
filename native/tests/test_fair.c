/* Whole endpoints beside a flow of TCP at one port, in virtual time, and alone. The table shows which share we take. It
 * has limits beside cubic, and for traffic that yields beside BBR as well. */
#include "congestion/class.h"
#include "congestion/scavenger.h"

#include "protocol/endpoint.h"
#include "tests/check.h"
#include "tests/network.h"
#include "tests/tcp.h"

enum { MIB = 1 << 20, MESSAGES_AHEAD = 8, WIRE_BYTES = 1514, PAYLOAD_BYTES = 1432, BUFFERS = 5, SEEDS = 3 };

static const double PRODUCTS[BUFFERS] = {0.1, 0.5, 1, 2, 4}; /* of bandwidth and delay: the port's buffer */

static uint8_t data[MIB], target[MIB];

struct place {
    double mbit;
    uint64_t round_us, sleep_us, us; /* the last: how long it is measured, after a quarter of that */
    double loss;                     /* of packets, by chance */
};

enum neighbour { NOBODY = -1, CUBIC = TCP_CUBIC, BBR = TCP_BBR };

struct shares {
    double ours, theirs; /* of the port's rate, percent */
};

/* How many packets of a link's length the buffer takes. */
static double packets_of(const struct place *place, double product)
{
    return product * (double)place->round_us * place->mbit / 8 / WIRE_BYTES;
}

/* Two hosts; the port of the second one is the bottleneck. */
static struct network *network_at(const struct place *place, double product, uint64_t seed)
{
    struct network *network = network_new(2, 1, 20 * place->mbit, 100000, 64 << 20, seed);
    double packets = packets_of(place, product);
    network_set_link(network_ingress(network, 1, 0), place->mbit, (uint32_t)(packets < 2 ? 2 : packets + 0.5) + 1);
    network_set_delay(network, place->round_us / 2);
    network_set_noise(network, (struct sim_noise){.loss = place->loss});
    network->sleep_ns = place->sleep_us * 1000;
    return network;
}

/* The neighbour joins later with each seed. */
static struct shares run(const struct place *place, double product, uint8_t class, enum neighbour neighbour,
                         uint64_t seed)
{
    struct network *network = network_at(place, product, seed);
    const struct cl_engine_stats *stats = cl_endpoint_stats(network->hosts[1].endpoint);
    uint64_t begun_us = network_now_us(network), joined_us = begun_us + 93000 + 7000 * seed;
    uint64_t warm_us = joined_us + place->us / 4, end_us = warm_us + place->us, ours = 0, theirs = 0;
    struct tcp *tcp = NULL;
    uint32_t posted = 0;
    for (uint64_t now_us = begun_us; now_us < end_us; now_us += 1000) {
        for (; posted < network->hosts[1].completed + MESSAGES_AHEAD; posted++)
            network_post(network,
                         (struct network_message){0, 1, {1, posted + 1, 0}, data, target, MIB, {.priority = class}});
        if (now_us >= joined_us && tcp == NULL && neighbour != NOBODY)
            tcp = tcp_new(network, (enum tcp_kind)neighbour, place->round_us);
        if (now_us <= warm_us) {
            ours = stats->payload_bytes_received;
            theirs = tcp != NULL ? tcp->carried : 0;
        }
        network_run_until(network, now_us + 1000);
    }
    double capacity = place->mbit * (double)place->us / 8 / WIRE_BYTES / 100; /* packets, per percent */
    struct shares shares = {(double)(stats->payload_bytes_received - ours) / PAYLOAD_BYTES / capacity,
                            tcp != NULL ? (double)(tcp->carried - theirs) / capacity : 0};
    network_free(network);
    tcp_free(tcp);
    return shares;
}

static const struct place PLACES[] = {
    {1000, 200, 0, 500000, 0},  {1000, 1000, 0, 1000000, 0}, {1000, 1000, 500, 1000000, 0},
    {200, 5000, 0, 4000000, 0}, {200, 20000, 0, 8000000, 0},
};

/* Sanitizers look at the code, which is the same in each place, and are slow. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { PLACES_RUN = 1 };
#else
enum { PLACES_RUN = sizeof PLACES / sizeof *PLACES };
#endif

static void print_row(const struct place *place, uint8_t class, enum neighbour neighbour, struct shares *shares)
{
    static const char *const NAMES[] = {"alone", "beside cubic", "beside BBR"};
    printf("   %4.0f Mbit/s, %4.1f ms, sleep %3u us, %-10s %-12s |", place->mbit, (double)place->round_us / 1e3,
           (unsigned)place->sleep_us, class == CL_CLASS_YIELDS ? "yields," : "class 4,", NAMES[neighbour + 1]);
    for (int i = 0; i < BUFFERS; i++) {
        uint64_t seeds = class == CL_CLASS_YIELDS || neighbour == NOBODY ? 1 : SEEDS;
        shares[i] = (struct shares){0, 0};
        for (uint64_t seed = 1; seed <= seeds; seed++) {
            struct shares taken = run(place, PRODUCTS[i], class, neighbour, seed);
            shares[i].ours += taken.ours / (double)seeds;
            shares[i].theirs += taken.theirs / (double)seeds;
        }
        printf(" %3.0f + %3.0f", shares[i].ours, shares[i].theirs);
    }
    printf("\n");
    fflush(stdout);
}

TEST(test_shares)
{
    printf("   our share + the neighbour's, %%, with buffers of 0.1, 0.5, 1, 2 and 4 bandwidth-delay products\n");
    for (size_t i = 0; i < PLACES_RUN; i++)
        for (int neighbour = NOBODY; neighbour <= BBR; neighbour++)
            for (int yields = 0; yields < 2; yields++) {
                struct shares shares[BUFFERS];
                print_row(&PLACES[i], yields ? CL_CLASS_YIELDS : 4, (enum neighbour)neighbour, shares);
                for (int j = 0; !yields && neighbour == CUBIC && j < BUFFERS; j++) {
                    if (packets_of(&PLACES[i], PRODUCTS[j]) < 8)
                        continue; /* see docs/congestion.md */
                    CHECK(shares[j].ours < (j ? 65 : 80) && (!j || shares[j].ours > 35));
                }
                for (int j = 1; yields && j < BUFFERS; j++) { /* from half a product on */
                    if (packets_of(&PLACES[i], PRODUCTS[j]) < 16)
                        continue; /* too few packets to show a queue */
                    CHECK(neighbour == NOBODY || shares[j].ours < 10);
                    CHECK(neighbour == NOBODY || shares[j].theirs > 90);
                    CHECK(neighbour != NOBODY || j < 2 || shares[j].ours > 75);
                }
            }
}

/* Losses that do not depend on the rate cost little, also where a short buffer overflows as well: in percent of the
 * link, with so many percent of random loss, and the least of what is left of the use without it. */
TEST(test_random_loss_and_a_short_buffer)
{
    static const struct {
        struct place place;
        double product, least, kept;
    } CASES[] = {
        {{1000, 1000, 500, 500000, 0}, 0.5, 70, 0.95}, /* hosts that sleep as long as the buffer lasts */
        {{1000, 1000, 500, 500000, 0}, 0.1, 18, 0.7},  {{1000, 1000, 0, 500000, 0}, 0.1, 70, 0.9},
        {{200, 5000, 0, 2000000, 0}, 0.1, 70, 0.75},   {{200, 20000, 0, 4000000, 0}, 0.5, 95, 0.98},
    };
    enum { RUNS = sizeof CASES / sizeof *CASES < PLACES_RUN ? sizeof CASES / sizeof *CASES : PLACES_RUN };
    for (size_t i = 0; i < RUNS; i++) {
        double used[2] = {0, 0};
        for (int lossy = 0; lossy < 2; lossy++) {
            struct place place = CASES[i].place;
            place.loss = lossy ? 0.01 : 0;
            for (uint64_t seed = 1; seed <= SEEDS; seed++)
                used[lossy] += run(&place, CASES[i].product, 4, NOBODY, seed).ours / SEEDS;
        }
        printf("   %4.0f Mbit/s, %4.1f ms, sleep %3u us, %.1f products: %3.0f %%, with 1 %% random loss %3.0f %%\n",
               CASES[i].place.mbit, (double)CASES[i].place.round_us / 1e3, (unsigned)CASES[i].place.sleep_us,
               CASES[i].product, used[0], used[1]);
        CHECK(used[0] > CASES[i].least);
        CHECK(used[1] > CASES[i].kept * used[0]);
    }
}

/* A short message of class 0 every 5 ms, or none, beside a message of class 4 that always goes on, and nobody else.
 * Returns the mean queue at the port, in us. */
static double queue_us_beside(bool urgent, const struct place *place)
{
    enum { URGENT_BYTES = 1024, EVERY_US = 5000, STEP_US = 1000 };
    SCOPED_NETWORK *network = network_at(place, 4, 1);
    const struct sim_queue *queue = &network_ingress(network, 1, 0)->queue;
    uint64_t begun_us = network_now_us(network), end_us = begun_us + place->us, times = 0;
    uint32_t posted[2] = {0};
    double bytes = 0;
    for (uint64_t now_us = begun_us; now_us < end_us; now_us += STEP_US) {
        for (; posted[0] + posted[1] < network->hosts[1].completed + MESSAGES_AHEAD; posted[0]++)
            network_post(network,
                         (struct network_message){0, 1, {1, posted[0] + 1, 0}, data, target, MIB, {.priority = 4}});
        if (urgent && (now_us - begun_us) % EVERY_US == 0)
            network_post(network, (struct network_message){
                                      0, 1, {2, ++posted[1], 0}, data, target, URGENT_BYTES, {.priority = 0}});
        network_run_until(network, now_us + STEP_US);
        bytes += now_us < begun_us + place->us / 4 ? 0 : (double)queue->bytes;
        times += now_us >= begun_us + place->us / 4;
    }
    return bytes * 8 / place->mbit / (double)times;
}

/* Urgent messages shorten the queue. While it drains, what is left of it is no sign of another flow. */
TEST(test_urgent_messages_begin_no_contest)
{
    printf("   mean queue in us, alone and with urgent messages\n");
    for (size_t i = 0; i < PLACES_RUN; i++) {
        double alone_us = queue_us_beside(false, &PLACES[i]), urgent_us = queue_us_beside(true, &PLACES[i]);
        printf("   %4.0f Mbit/s, %4.1f ms, sleep %3u us | %5.0f %5.0f\n", PLACES[i].mbit,
               (double)PLACES[i].round_us / 1e3, (unsigned)PLACES[i].sleep_us, alone_us, urgent_us);
        CHECK(urgent_us < 0.7 * alone_us);
    }
}
