#include "tests/tcp.h"

#include <math.h>

/* An acknowledgement on its way back. */
struct tcp_ack {
    struct sim_event event; /* the first member */
    struct tcp *tcp;
    uint64_t number;
};

static const uint64_t SILENCE_NS = 300000000;

static uint64_t in_flight(const struct tcp *tcp)
{
    return tcp->next - tcp->acked;
}

static void emit(struct tcp *tcp)
{
    struct network *network = tcp->network;
    struct sim_datagram *datagram = sim_pool_take(&network->links.medium.pool);
    datagram->to = 1;
    datagram->protocol = NETWORK_OTHERS;
    datagram->length = NETWORK_DATAGRAM_BYTES;
    uint64_t words[2] = {(uint64_t)(uintptr_t)tcp, tcp->next}, now_ns = network->clock.now_ns;
    memcpy(datagram->bytes, words, sizeof words);
    tcp->sent[tcp->next++ % TCP_RING] =
        (struct tcp_sent){now_ns, tcp->bbr.delivered, tcp->bbr.delivered_ns > 0 ? tcp->bbr.delivered_ns : now_ns};
    datagram->route[datagram->hops++] = network_ingress(network, 1, 0);
    sim_link_send(datagram->route[0], datagram);
}

/* ---- cubic: RFC 9438 ---- */

static const double BETA = 0.7, C = 0.4;

static void cubic_push(struct tcp *tcp)
{
    while ((double)in_flight(tcp) + 1 <= tcp->cubic.window)
        emit(tcp);
    sim_clock_schedule(&tcp->network->clock, &tcp->timer, tcp->network->clock.now_ns + 200000000 + 2 * tcp->round_ns);
}

static void cubic_timeout(struct tcp *tcp)
{
    struct tcp_cubic *cubic = &tcp->cubic;
    tcp->acked = tcp->next; /* everything is lost */
    cubic->threshold = fmax(cubic->window / 2, 2);
    cubic->window = 1;
    cubic->epoch_ns = 0;
}

static void cubic_lost(struct tcp *tcp)
{
    struct tcp_cubic *cubic = &tcp->cubic;
    cubic->before = cubic->window < cubic->before ? cubic->window * (1 + BETA) / 2 : cubic->window;
    cubic->window = fmax(BETA * cubic->window, 2);
    cubic->threshold = cubic->window;
    cubic->recover = tcp->next;
    cubic->epoch_ns = 0;
}

static void cubic_acked(struct tcp *tcp, uint64_t took_ns)
{
    struct tcp_cubic *cubic = &tcp->cubic;
    uint64_t now_ns = tcp->network->clock.now_ns;
    cubic->least_ns = took_ns < cubic->least_ns ? took_ns : cubic->least_ns;
    if (tcp->acked <= cubic->recover)
        return;
    if (cubic->window < cubic->threshold) {
        double room_ns = fmin(fmax((double)cubic->least_ns / 8, 4e6), 16e6);
        if (++cubic->window >= 16 && (double)took_ns > (double)cubic->least_ns + room_ns)
            cubic->threshold = cubic->window;
        return;
    }
    if (!cubic->epoch_ns) {
        cubic->epoch_ns = now_ns;
        cubic->reno = cubic->window;
        cubic->k = cubic->before > cubic->window ? cbrt((cubic->before - cubic->window) / C) : 0;
        cubic->origin = fmax(cubic->before, cubic->window);
    }
    double s = (double)(now_ns - cubic->epoch_ns + cubic->least_ns) / 1e9 - cubic->k;
    double wanted = fmin(cubic->origin + C * s * s * s, 1.5 * cubic->window);
    cubic->reno += (cubic->reno < cubic->before ? 3 * (1 - BETA) / (1 + BETA) : 1) / cubic->window;
    wanted = fmax(wanted, cubic->reno);
    cubic->window += (wanted > cubic->window ? wanted - cubic->window : 0.01) / cubic->window;
}

/* ---- BBR version 1 ---- */

static const double HIGH = 2.885, CYCLE[] = {1.25, 0.75, 1, 1, 1, 1, 1, 1};

static double bbr_rate(const struct tcp_bbr *bbr)
{
    double most = 0;
    for (int i = 0; i < TCP_ROUNDS; i++)
        most = fmax(most, bbr->rates[i]);
    return most;
}

static double bbr_window(const struct tcp_bbr *bbr)
{
    double product = bbr_rate(bbr) * (double)bbr->least_ns;
    double window = bbr->state == BBR_ROUND_TRIP ? 4 : (bbr->state == BBR_BANDWIDTH ? 2 : HIGH) * product;
    return bbr->rounds < 2 ? 10 : fmax(window, 4);
}

static double bbr_gain(const struct tcp_bbr *bbr)
{
    static const double GAINS[] = {2.885, 1 / 2.885, 0, 1};
    return bbr->state == BBR_BANDWIDTH ? CYCLE[bbr->phase] : GAINS[bbr->state];
}

static void bbr_push(struct tcp *tcp)
{
    struct tcp_bbr *bbr = &tcp->bbr;
    struct sim_clock *clock = &tcp->network->clock;
    while ((double)in_flight(tcp) < bbr_window(bbr)) {
        if (bbr->rounds >= 2) {
            if (clock->now_ns < bbr->next_ns) {
                sim_clock_schedule(clock, &tcp->timer, bbr->next_ns);
                return;
            }
            uint64_t from_ns = bbr->next_ns > clock->now_ns ? bbr->next_ns : clock->now_ns;
            bbr->next_ns = from_ns + (uint64_t)(1 / (bbr_gain(bbr) * bbr_rate(bbr)));
        }
        emit(tcp);
    }
    sim_clock_schedule(clock, &tcp->timer, clock->now_ns + SILENCE_NS);
}

static void bbr_end_round(struct tcp_bbr *bbr)
{
    bbr->round_delivered = bbr->delivered;
    bbr->rates[++bbr->rounds % TCP_ROUNDS] = 0;
    if (bbr->state != BBR_STARTUP)
        return;
    double most = bbr_rate(bbr);
    if (most > 1.25 * bbr->full_rate) {
        bbr->full_rate = most;
        bbr->full_rounds = 0;
    } else if (++bbr->full_rounds >= 3 && bbr->rounds > 4) {
        bbr->state = BBR_DRAIN;
    }
}

static void bbr_acked(struct tcp *tcp, uint64_t number, uint64_t took_ns)
{
    struct tcp_bbr *bbr = &tcp->bbr;
    const struct tcp_sent *sent = &tcp->sent[number % TCP_RING];
    uint64_t now_ns = tcp->network->clock.now_ns;
    bool old = bbr->least_ns > 0 && now_ns > bbr->least_at_ns + 10000000000;
    bbr->delivered++;
    bbr->delivered_ns = now_ns;
    if (old && bbr->state == BBR_BANDWIDTH) {
        bbr->state = BBR_ROUND_TRIP;
        bbr->probe_until_ns = now_ns + 200000000;
    }
    if (bbr->least_ns == 0 || took_ns <= bbr->least_ns || old) {
        bbr->least_ns = took_ns;
        bbr->least_at_ns = now_ns;
    }
    if (sent->delivered >= bbr->round_delivered)
        bbr_end_round(bbr);
    if (now_ns > sent->delivered_ns) {
        double rate = (double)(bbr->delivered - sent->delivered) / (double)(now_ns - sent->delivered_ns);
        double *most = &bbr->rates[bbr->rounds % TCP_ROUNDS];
        *most = fmax(*most, rate);
    }
    double product = bbr_rate(bbr) * (double)bbr->least_ns, flying = (double)in_flight(tcp);
    if (bbr->state == BBR_DRAIN && flying <= product) {
        bbr->state = BBR_BANDWIDTH;
        bbr->phase = 2;
        bbr->cycle_ns = now_ns;
    } else if (bbr->state == BBR_BANDWIDTH && now_ns > bbr->cycle_ns + bbr->least_ns &&
               (bbr->phase != 0 || flying >= 1.25 * product || now_ns > bbr->cycle_ns + 4 * bbr->least_ns)) {
        bbr->phase = (bbr->phase + 1) % 8;
        bbr->cycle_ns = now_ns;
    } else if (bbr->state == BBR_ROUND_TRIP && now_ns > bbr->probe_until_ns) {
        bbr->state = BBR_BANDWIDTH;
        bbr->least_at_ns = bbr->cycle_ns = now_ns;
    }
}

/* ---- both ---- */

static void push(struct tcp *tcp)
{
    if (tcp->kind == TCP_CUBIC)
        cubic_push(tcp);
    else
        bbr_push(tcp);
}

static void on_timer(struct sim_event *event)
{
    struct tcp *tcp = (struct tcp *)(void *)event; /* its first member */
    if (tcp->kind == TCP_CUBIC)
        cubic_timeout(tcp);
    else if (tcp->network->clock.now_ns >= tcp->bbr.delivered_ns + SILENCE_NS)
        tcp->acked = tcp->next;
    push(tcp);
}

static void on_ack(struct sim_event *event)
{
    struct tcp_ack *ack = (struct tcp_ack *)(void *)event; /* its first member */
    struct tcp *tcp = ack->tcp;
    uint64_t number = ack->number;
    if (number < tcp->acked)
        return;
    bool lost = number > tcp->acked, again = tcp->acked >= tcp->cubic.recover;
    uint64_t took_ns = tcp->network->clock.now_ns - tcp->sent[number % TCP_RING].sent_ns;
    tcp->acked = number + 1;
    if (tcp->kind == TCP_CUBIC) {
        if (lost && again)
            cubic_lost(tcp);
        cubic_acked(tcp, took_ns);
    } else {
        bbr_acked(tcp, number, took_ns);
    }
    push(tcp);
}

static void arrived(const struct sim_datagram *datagram)
{
    uint64_t words[2];
    memcpy(words, datagram->bytes, sizeof words);
    struct tcp *tcp = (struct tcp *)(uintptr_t)words[0];
    tcp->carried++;
    struct tcp_ack *ack = &tcp->acks[words[1] % TCP_RING];
    *ack = (struct tcp_ack){.event = {.fire = on_ack}, .tcp = tcp, .number = words[1]};
    sim_clock_schedule(&tcp->network->clock, &ack->event, tcp->network->clock.now_ns + tcp->round_ns);
}

struct tcp *tcp_new(struct network *network, enum tcp_kind kind, uint64_t round_us)
{
    struct tcp *tcp = calloc(1, sizeof *tcp);
    CHECK(tcp != NULL);
    tcp->acks = calloc(TCP_RING, sizeof *tcp->acks);
    CHECK(tcp->acks != NULL);
    tcp->timer.fire = on_timer;
    tcp->network = network;
    tcp->kind = kind;
    tcp->round_ns = round_us * 1000;
    tcp->cubic = (struct tcp_cubic){.window = 10, .threshold = 1e9, .least_ns = UINT64_MAX};
    network->others = arrived;
    push(tcp);
    return tcp;
}

void tcp_free(struct tcp *tcp)
{
    if (tcp != NULL)
        free(tcp->acks);
    free(tcp);
}
