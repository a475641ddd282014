#include "protocol/loss.h"

enum {
    TOO_OLD = 1 << 14,    /* numbers */
    OVERTAKEN_US = 50000, /* longest wait behind more urgent packets in a switch */
    ACK_DELAY_US = 1000,  /* less than CL_ACK_DELAY_US: the last packet has asked for an acknowledgement at once */
};

void cl_loss_init(struct cl_loss *loss)
{
    *loss = (struct cl_loss){
        .deadline_us = UINT64_MAX, .packet_threshold = CL_LOSS_PACKET_THRESHOLD, .time_shift = CL_LOSS_TIME_SHIFT};
}

void cl_loss_on_acked(struct cl_loss *loss, uint64_t number, uint8_t class)
{
    loss->any_acked = true;
    for (int i = 0; i <= class; i++)
        if (number > loss->largest_acked[i])
            loss->largest_acked[i] = number;
}

void cl_loss_count(struct cl_loss *loss, uint32_t acked, uint32_t lost)
{
    double weight = (double)(acked + lost) / CL_LOSS_SHARE_PACKETS;
    if (weight < 1)
        loss->share += (double)lost / CL_LOSS_SHARE_PACKETS - weight * loss->share;
    else
        loss->share = (double)lost / (acked + lost);
}

static void declare(struct cl_loss *loss, struct cl_sent *sent, uint64_t number, cl_loss_fn lost, void *argument)
{
    struct cl_sent_packet packet = *cl_sent_find(sent, number);
    cl_sent_remove(sent, number);
    uint32_t slot = loss->recent_count++ % CL_LOSS_RECENT;
    loss->recent_number[slot] = number;
    loss->recent[slot] = packet;
    loss->recent[slot].in_flight = true; /* its acknowledgement may still come */
    lost(argument, &packet);
}

/* Counts the rounds of losses, one per round trip at most, and halves what the thresholds have grown by once many of
 * them were real: a network that reordered for a while must not make every later loss take a window to notice. */
static void count_round(struct cl_loss *loss, uint64_t lowest, uint64_t next)
{
    if (lowest < loss->round_ends)
        return;
    loss->round_ends = next;
    if (++loss->undisputed < CL_LOSS_PERSIST)
        return;
    loss->undisputed = 0;
    loss->packet_threshold -= (loss->packet_threshold - CL_LOSS_PACKET_THRESHOLD + 1) / 2;
    if (loss->time_shift < CL_LOSS_TIME_SHIFT)
        loss->time_shift++;
}

void cl_loss_detect(struct cl_loss *loss, struct cl_sent *sent, const struct cl_rtt *rtt, uint64_t now_us,
                    cl_loss_fn lost, void *argument)
{
    loss->deadline_us = UINT64_MAX;
    if (!loss->any_acked)
        return;
    uint64_t rtt_us = rtt->smoothed_us > rtt->latest_us ? rtt->smoothed_us : rtt->latest_us;
    uint64_t wait_us = rtt_us + (rtt_us >> loss->time_shift) + 1, lowest = UINT64_MAX;
    for (uint64_t number = sent->low; number < loss->largest_acked[0] && number < sent->next; number++) {
        const struct cl_sent_packet *packet = cl_sent_find(sent, number);
        if (packet == NULL)
            continue;
        uint64_t largest = loss->largest_acked[packet->class];
        uint64_t due_us = packet->sent_us + wait_us + (number < largest ? 0 : OVERTAKEN_US);
        if (number + loss->packet_threshold <= largest || due_us <= now_us) {
            lowest = lowest == UINT64_MAX ? number : lowest;
            declare(loss, sent, number, lost, argument);
        } else if (due_us < loss->deadline_us) {
            loss->deadline_us = due_us;
        }
    }
    if (lowest != UINT64_MAX)
        count_round(loss, lowest, sent->next);
}

void cl_loss_give_up(struct cl_loss *loss, struct cl_sent *sent, cl_loss_fn lost, void *argument)
{
    loss->deadline_us = UINT64_MAX;
    for (uint64_t number = sent->low; number < sent->next; number++)
        if (cl_sent_find(sent, number) != NULL)
            declare(loss, sent, number, lost, argument);
}

static bool acknowledges(const struct cl_ack_frame *frame, uint64_t number)
{
    for (uint32_t i = 0; i < frame->refused_count; i++)
        if (number >= frame->refused[i].start && number < frame->refused[i].end)
            return false;
    for (uint32_t i = 0; i < frame->came_count; i++)
        if (number >= frame->came[i].start && number < frame->came[i].end)
            return true;
    return false;
}

void cl_loss_on_frame(struct cl_loss *loss, const struct cl_ack_frame *frame, cl_loss_fn late, void *argument)
{
    for (uint32_t i = 0; i < CL_LOSS_RECENT && i < loss->recent_count; i++) {
        struct cl_sent_packet *packet = &loss->recent[i];
        if (!packet->in_flight)
            continue;
        if (loss->recent_number[i] + TOO_OLD < frame->largest)
            packet->in_flight = false; /* acknowledgements do not report such old packets reliably */
        if (!packet->in_flight || !acknowledges(frame, loss->recent_number[i]))
            continue;
        packet->in_flight = false;
        loss->undisputed = 0;
        loss->share -= 1.0 / CL_LOSS_SHARE_PACKETS;
        if (loss->share < 0)
            loss->share = 0;
        /* from now on, wait longer than this packet needed */
        uint64_t largest = loss->largest_acked[packet->class], needed = largest - loss->recent_number[i] + 1;
        if (largest >= loss->recent_number[i] && needed > loss->packet_threshold)
            loss->packet_threshold =
                needed < CL_LOSS_PACKET_THRESHOLD_MAX ? (uint32_t)needed : CL_LOSS_PACKET_THRESHOLD_MAX;
        if (loss->time_shift > 0)
            loss->time_shift--;
        late(argument, packet);
    }
}

uint64_t cl_loss_pto_us(const struct cl_loss *loss, const struct cl_sent *sent, const struct cl_rtt *rtt)
{
    if (sent->packets == sent->pings)
        return UINT64_MAX;
    uint64_t wait_us = (uint64_t)rtt->smoothed_us + 4 * (uint64_t)rtt->variation_us + ACK_DELAY_US;
    if (!loss->pto_count) {
        /* The first PTO is early. It costs one packet, and at the end of a message everybody waits for it, just when
         * the queues have drained and round trips are shorter than their average. */
        uint32_t least_us = rtt->latest_us < rtt->smoothed_us ? rtt->latest_us : rtt->smoothed_us;
        wait_us = (uint64_t)least_us + rtt->variation_us + ACK_DELAY_US;
    }
    if (wait_us < CL_LOSS_PTO_MIN_US)
        wait_us = CL_LOSS_PTO_MIN_US;
    /* Every second PTO doubles the wait, not each. A full port drops probes, too. With a wait as long as all before it
     * together, a few of a hundred hosts that send to one port would be silent long after the others have left it. */
    uint32_t doublings = (loss->pto_count + 1) / 2;
    uint64_t backed_off_us = wait_us << (doublings < 8 ? doublings : 8);
    if (backed_off_us > CL_LOSS_PTO_MAX_US)
        backed_off_us = wait_us > CL_LOSS_PTO_MAX_US ? wait_us : CL_LOSS_PTO_MAX_US;
    return sent->last_sent_us + backed_off_us;
}
