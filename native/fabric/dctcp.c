#include "fabric/dctcp.h"

#include <string.h>

#include "sim/memory.h"

enum {
    HEAD_BYTES = 40 + 12, /* IP and TCP headers, time stamps */
    UDP_BYTES = 28,       /* counted by the links as overhead, but TCP has no UDP header */
    WINDOW_START = 10,
    REORDER = 3,
    BACKOFFS_MAX = 6,
};

static const double G = 1.0 / 16;
static const double WINDOW_MIN = 1;
static const double WINDOW_MAX = 1 << 14;

/* The head of a datagram, in both directions. */
struct segment_head {
    struct sim_dctcp_connection *connection;
    bool acknowledges, echo; /* echo: the acknowledged segment was marked */
    uint64_t number;         /* of the segment; in an acknowledgement: of the segment that came */
    uint64_t expected;       /* everything before it has come */
    uint64_t block_end;      /* so have the segments from `number` to here */
    uint64_t sent_ns;        /* time stamp */
};

static struct sim_dctcp_segment *at(const struct sim_dctcp_connection *connection, uint64_t number)
{
    return &connection->segments[number & (connection->capacity - 1)];
}

static uint64_t now_ns(const struct sim_dctcp_connection *connection)
{
    return connection->dctcp->fabric->medium.clock->now_ns;
}

static void emit(struct sim_dctcp_connection *connection, const struct segment_head *head, uint32_t payload)
{
    struct sim_fabric *fabric = connection->dctcp->fabric;
    struct sim_datagram *datagram = sim_fabric_take(fabric);
    datagram->from = head->acknowledges ? connection->to : connection->from;
    datagram->to = head->acknowledges ? connection->from : connection->to;
    datagram->protocol = connection->dctcp->protocol;
    datagram->priority = connection->flow ? SIM_CLASS_OTHERS : 0;
    datagram->ecn = SIM_ECT;
    datagram->length = HEAD_BYTES - UDP_BYTES + payload;
    memcpy(datagram->bytes, head, sizeof *head);
    sim_fabric_send(fabric, datagram, (uint64_t)connection->salt << 33 | (uint64_t)datagram->from << 16 | datagram->to);
}

/* ---- sender ---- */

static uint64_t rto_ns(const struct sim_dctcp_connection *connection)
{
    /* Without a sample the minimum applies: a handshake, not simulated, would have measured the round trip. */
    uint64_t rto_ns = connection->srtt_ns + 4 * connection->variation_ns, least_ns = connection->dctcp->rto_min_ns;
    return (rto_ns < least_ns ? least_ns : rto_ns) << connection->timeouts;
}

static void arm(struct sim_dctcp_connection *connection)
{
    connection->rto_at_ns = now_ns(connection) + rto_ns(connection);
    if (connection->rto.slot == 0) /* else the event reschedules itself when it fires */
        sim_clock_schedule(connection->dctcp->fabric->medium.clock, &connection->rto, connection->rto_at_ns);
}

static void transmit(struct sim_dctcp_connection *connection, uint64_t number)
{
    struct sim_dctcp_segment *segment = at(connection, number);
    segment->state = SIM_SEGMENT_FLYING;
    segment->order = ++connection->orders;
    segment->sent_ns = now_ns(connection);
    connection->flying++;
    connection->dctcp->counts.segments++;
    struct segment_head head = {.connection = connection, .number = number, .sent_ns = segment->sent_ns};
    emit(connection, &head, segment->length);
}

static void push(struct sim_dctcp_connection *connection)
{
    bool idle = connection->flying == 0;
    uint64_t number = connection->una;
    while (connection->lost > 0 && connection->flying < (uint64_t)connection->window) {
        while (at(connection, number)->state != SIM_SEGMENT_LOST)
            number++;
        connection->lost--;
        connection->dctcp->counts.again++;
        transmit(connection, number);
    }
    while (connection->next < connection->end && connection->flying < (uint64_t)connection->window)
        transmit(connection, connection->next++);
    if (idle && connection->flying > 0)
        arm(connection);
}

static void lose(struct sim_dctcp_connection *connection, struct sim_dctcp_segment *segment)
{
    segment->state = SIM_SEGMENT_LOST;
    connection->flying--;
    connection->lost++;
}

static void cut(struct sim_dctcp_connection *connection, double part)
{
    connection->threshold = connection->window * (1 - part);
    connection->threshold = connection->threshold < 2 * WINDOW_MIN ? 2 * WINDOW_MIN : connection->threshold;
    connection->window *= 1 - part;
    connection->window = connection->window < WINDOW_MIN ? WINDOW_MIN : connection->window;
    connection->cut_until = connection->hold_until = connection->next;
    connection->dctcp->counts.cuts++;
}

static void on_rto(struct sim_event *event)
{
    struct sim_dctcp_connection *connection = (struct sim_dctcp_connection *)(void *)event; /* its first member */
    if (connection->una == connection->next)
        return;
    if (now_ns(connection) < connection->rto_at_ns) {
        sim_clock_schedule(connection->dctcp->fabric->medium.clock, &connection->rto, connection->rto_at_ns);
        return;
    }
    connection->dctcp->counts.timeouts++;
    connection->timeouts += connection->timeouts < BACKOFFS_MAX;
    for (uint64_t number = connection->una; number < connection->next; number++)
        if (at(connection, number)->state == SIM_SEGMENT_FLYING)
            lose(connection, at(connection, number));
    cut(connection, 0.5);
    connection->window = WINDOW_MIN;
    connection->hold_until = connection->una; /* slow start begins at once */
    arm(connection);
    push(connection);
}

static void time_round_trip(struct sim_dctcp_connection *connection, uint64_t sample_ns)
{
    if (connection->srtt_ns == 0) {
        connection->srtt_ns = sample_ns;
        connection->variation_ns = sample_ns / 2;
        return;
    }
    uint64_t srtt_ns = connection->srtt_ns;
    uint64_t apart_ns = sample_ns > srtt_ns ? sample_ns - srtt_ns : srtt_ns - sample_ns;
    connection->variation_ns = (3 * connection->variation_ns + apart_ns) / 4;
    connection->srtt_ns = (7 * srtt_ns + sample_ns) / 8;
}

/* Counts the segments from `start` to `end` as delivered; returns how many are new. */
static uint32_t deliver_range(struct sim_dctcp_connection *connection, uint64_t start, uint64_t end)
{
    uint32_t fresh = 0;
    for (uint64_t number = start < connection->una ? connection->una : start; number < end; number++) {
        struct sim_dctcp_segment *segment = at(connection, number);
        if (segment->state == SIM_SEGMENT_SACKED)
            continue;
        *(segment->state == SIM_SEGMENT_FLYING ? &connection->flying : &connection->lost) -= 1;
        segment->state = SIM_SEGMENT_SACKED;
        if (segment->order > connection->newest_order)
            connection->newest_order = segment->order;
        fresh++;
    }
    return fresh;
}

/* A segment is lost when later transmissions have arrived. */
static void detect_losses(struct sim_dctcp_connection *connection)
{
    bool any = false;
    if (connection->next - connection->una == (uint64_t)connection->flying + connection->lost)
        return; /* all segments came in order so far */
    for (uint64_t number = connection->una; number < connection->next; number++) {
        struct sim_dctcp_segment *segment = at(connection, number);
        if (segment->state != SIM_SEGMENT_FLYING || segment->order + REORDER > connection->newest_order)
            continue;
        lose(connection, segment);
        any = true;
    }
    if (any && connection->una >= connection->cut_until)
        cut(connection, 0.5);
}

static void grow(struct sim_dctcp_connection *connection, uint32_t acked, bool limited)
{
    if (!limited || connection->una < connection->hold_until)
        return; /* the window is not the limit, or has just shrunk */
    if (connection->window < connection->threshold)
        connection->window += acked;
    else
        connection->window += acked / connection->window;
    connection->window = connection->window > WINDOW_MAX ? WINDOW_MAX : connection->window;
}

static void observe_marks(struct sim_dctcp_connection *connection, uint32_t acked, bool echo)
{
    connection->round_acked += acked;
    connection->round_marked += echo ? acked : 0;
    if (connection->una >= connection->round_end) {
        double part =
            connection->round_acked > 0 ? (double)connection->round_marked / (double)connection->round_acked : 0;
        connection->alpha = (1 - G) * connection->alpha + G * part;
        connection->round_end = connection->next;
        connection->round_acked = connection->round_marked = 0;
    }
    if (echo && connection->una >= connection->cut_until)
        cut(connection, connection->alpha / 2);
}

/* ---- messages ---- */

/* Reports sends acknowledged by now, in order. A callback may send and receive more. */
static void finish_sends(struct sim_dctcp_connection *connection)
{
    struct sim_transport *transport = &connection->dctcp->transport;
    for (struct sim_dctcp_message *message = connection->messages; message != NULL;) {
        if (message->end == 0 || message->end > connection->una || message->send_context == NULL) {
            message = message->next;
            continue;
        }
        void *context = message->send_context;
        message->send_context = NULL;
        transport->done(context, 0);
        message = connection->messages;
    }
}

static void finish_receives(struct sim_dctcp_connection *connection)
{
    struct sim_transport *transport = &connection->dctcp->transport;
    for (struct sim_dctcp_message *message = connection->messages; message != NULL;) {
        message->arrived = message->end != 0 && message->end <= connection->expected;
        if (!message->arrived || message->receive_context == NULL) {
            message = message->next;
            continue;
        }
        void *context = message->receive_context;
        message->receive_context = NULL;
        message->received = true;
        transport->done(context, 0);
        message = connection->messages;
    }
}

/* Frees messages completed at both ends; never from within a callback. */
static void purge(struct sim_dctcp_connection *connection)
{
    for (struct sim_dctcp_message **link = &connection->messages; *link != NULL;) {
        struct sim_dctcp_message *message = *link;
        if (!message->received || message->send_context != NULL) {
            link = &message->next;
            continue;
        }
        *link = message->next;
        free(message);
    }
}

static struct sim_dctcp_message *find(struct sim_dctcp_connection *connection, const struct sim_message *named)
{
    struct sim_dctcp_message **link = &connection->messages;
    for (; *link != NULL; link = &(*link)->next)
        if ((*link)->job == named->job && (*link)->index == named->index)
            return *link;
    *link = sim_new(1, sizeof **link);
    (*link)->job = named->job;
    (*link)->index = named->index;
    return *link;
}

/* ---- arrivals ---- */

static void on_segment(struct sim_dctcp_connection *connection, const struct segment_head *head, bool marked)
{
    if (head->number >= connection->expected) {
        at(connection, head->number)->arrived = true;
        while (connection->expected < connection->next && at(connection, connection->expected)->arrived)
            at(connection, connection->expected++)->arrived = false;
    }
    struct segment_head answer = {.connection = connection,
                                  .acknowledges = true,
                                  .echo = marked,
                                  .number = head->number,
                                  .expected = connection->expected,
                                  .block_end = head->number + 1,
                                  .sent_ns = head->sent_ns};
    if (head->number > connection->expected) {
        while (answer.number > connection->expected && at(connection, answer.number - 1)->arrived)
            answer.number--;
        while (answer.block_end < connection->next && at(connection, answer.block_end)->arrived)
            answer.block_end++;
    }
    emit(connection, &answer, 0);
    finish_receives(connection);
}

static void on_acknowledgement(struct sim_dctcp_connection *connection, const struct segment_head *head)
{
    bool limited = connection->flying + 1 >= (uint64_t)connection->window || connection->lost > 0;
    uint32_t fresh = deliver_range(connection, connection->una, head->expected) +
                     deliver_range(connection, head->number, head->block_end);
    if (head->expected > connection->una)
        connection->una = head->expected;
    if (fresh > 0) {
        time_round_trip(connection, now_ns(connection) - head->sent_ns);
        connection->timeouts = 0;
        grow(connection, fresh, limited);
        observe_marks(connection, fresh, head->echo);
        detect_losses(connection);
        arm(connection);
    }
    push(connection);
    finish_sends(connection);
    if (connection->flow && connection->una == connection->end && connection->segments != NULL) {
        sim_clock_cancel(connection->dctcp->fabric->medium.clock, &connection->rto);
        free(connection->segments);
        connection->segments = NULL;
        if (connection->dctcp->flow_done != NULL)
            connection->dctcp->flow_done(connection->context);
    }
}

static void deliver(struct sim_transport *transport, struct sim_datagram *datagram)
{
    struct sim_dctcp *dctcp = (struct sim_dctcp *)(void *)transport; /* its first member */
    struct segment_head head;
    memcpy(&head, datagram->bytes, sizeof head);
    bool marked = datagram->ecn == SIM_CE;
    sim_pool_give(&dctcp->fabric->medium.pool, datagram);
    if (head.acknowledges)
        on_acknowledgement(head.connection, &head);
    else
        on_segment(head.connection, &head, marked);
    purge(head.connection);
}

/* ---- connections ---- */

static struct sim_dctcp_connection *open_connection(struct sim_dctcp *dctcp, uint16_t from, uint16_t to, uint32_t salt)
{
    struct sim_dctcp_connection *connection = sim_new(1, sizeof *connection);
    *connection = (struct sim_dctcp_connection){.rto = {.fire = on_rto},
                                                .dctcp = dctcp,
                                                .from = from,
                                                .to = to,
                                                .salt = salt,
                                                .window = WINDOW_START,
                                                .threshold = WINDOW_MAX,
                                                .alpha = 1,
                                                .made = dctcp->made};
    dctcp->made = connection;
    return connection;
}

static void write_segments(struct sim_dctcp_connection *connection, uint64_t length)
{
    uint32_t full = connection->dctcp->segment_bytes;
    uint64_t count = length > 0 ? (length + full - 1) / full : 1, capacity = connection->capacity;
    while (capacity < connection->end - connection->una + count)
        capacity = capacity > 0 ? 2 * capacity : 16;
    if (capacity > connection->capacity) {
        struct sim_dctcp_segment *segments = sim_new(capacity, sizeof *segments);
        for (uint64_t number = connection->una; number < connection->end; number++)
            segments[number & (capacity - 1)] = *at(connection, number);
        free(connection->segments);
        connection->segments = segments;
        connection->capacity = capacity;
    }
    for (uint64_t i = 0; i < count; i++, length -= full)
        *at(connection, connection->end++) =
            (struct sim_dctcp_segment){.length = length < full ? (uint32_t)length : full};
    push(connection);
}

static struct sim_dctcp_connection *connection_of(struct sim_dctcp *dctcp, const struct sim_message *message)
{
    struct sim_dctcp_connection **connection = &dctcp->connections[message->from * dctcp->fabric->hosts + message->to];
    if (*connection == NULL)
        *connection = open_connection(dctcp, message->from, message->to, 0);
    return *connection;
}

static void send_message(struct sim_transport *transport, const struct sim_message *named, void *context)
{
    struct sim_dctcp_connection *connection = connection_of((struct sim_dctcp *)(void *)transport, named);
    struct sim_dctcp_message *message = find(connection, named);
    uint64_t before = connection->end, full = connection->dctcp->segment_bytes;
    message->end = before + (named->length > 0 ? (named->length + full - 1) / full : 1);
    message->send_context = context;
    write_segments(connection, named->length);
}

static void receive_message(struct sim_transport *transport, const struct sim_message *named, void *context)
{
    struct sim_dctcp_connection *connection = connection_of((struct sim_dctcp *)(void *)transport, named);
    struct sim_dctcp_message *message = find(connection, named);
    message->receive_context = context;
    if (message->arrived) /* it has waited for this */
        finish_receives(connection);
}

void sim_dctcp_flow(struct sim_dctcp *dctcp, uint16_t from, uint16_t to, uint32_t salt, uint64_t length, void *context)
{
    struct sim_dctcp_connection *connection = open_connection(dctcp, from, to, salt);
    connection->flow = true;
    connection->context = context;
    write_segments(connection, length);
}

void sim_dctcp_init(struct sim_dctcp *dctcp, struct sim_fabric *fabric, uint8_t protocol, uint32_t mtu,
                    uint64_t rto_min_ns)
{
    *dctcp = (struct sim_dctcp){.transport = {.send = send_message, .receive = receive_message, .deliver = deliver},
                                .fabric = fabric,
                                .protocol = protocol,
                                .segment_bytes = mtu - HEAD_BYTES,
                                .rto_min_ns = rto_min_ns};
    dctcp->connections = sim_new((size_t)fabric->hosts * fabric->hosts, sizeof(struct sim_dctcp_connection *));
    fabric->transports[protocol] = &dctcp->transport;
}

void sim_dctcp_free(struct sim_dctcp *dctcp)
{
    while (dctcp->made != NULL) {
        struct sim_dctcp_connection *connection = dctcp->made;
        dctcp->made = connection->made;
        sim_clock_cancel(dctcp->fabric->medium.clock, &connection->rto);
        for (struct sim_dctcp_message *message = connection->messages, *next; message != NULL; message = next) {
            next = message->next;
            free(message);
        }
        free(connection->segments);
        free(connection);
    }
    free(dctcp->connections);
}
