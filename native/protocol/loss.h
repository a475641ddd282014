/*
 * Loss: decides when a packet in flight counts as lost (RFC 9002, section 6).
 *
 * A packet is lost if it was sent before an acknowledged packet by at least packet_threshold numbers or the time
 * threshold (9/8 of a round trip). More urgent packets may overtake it in switches: their numbers do not count. Both
 * thresholds grow when a late acknowledgement disproves a loss, as the network reorders, and shrink again after
 * CL_LOSS_PERSIST rounds of losses that nothing disproved (RFC 8985, section 6.2, has the same number). When no
 * acknowledgement comes at all, a probe timeout (PTO) fires. It declares nothing lost but sends a probe: a receiver
 * that was not scheduled for some milliseconds costs one packet.
 */
#pragma once

#include "protocol/ack.h"
#include "protocol/rtt.h"
#include "protocol/sent.h"

enum {
    CL_LOSS_PACKET_THRESHOLD = 3,
    CL_LOSS_PACKET_THRESHOLD_MAX = 128,
    CL_LOSS_RECENT = 64, /* else packets that wait for long in a slow queue would be sent again and again */
    CL_LOSS_TIME_SHIFT = 3,
    CL_LOSS_PERSIST = 16,
    CL_LOSS_SHARE_PACKETS = 1024,
    CL_LOSS_PTO_MIN_US = 2000,
    CL_LOSS_PTO_MAX_US = 200000,
};

struct cl_loss {
    uint64_t
        largest_acked[CL_CLASSES_BETWEEN_HOSTS]; /* number, of a class and all less urgent ones; valid if any_acked */
    uint64_t deadline_us;                        /* when the time threshold is next reached; UINT64_MAX: no candidate */
    uint32_t packet_threshold;
    uint32_t time_shift; /* time threshold = rtt + rtt >> time_shift */
    uint32_t undisputed; /* rounds of losses since a threshold changed */
    uint64_t round_ends; /* losses of lower numbers belong to the current round */
    uint32_t pto_count;  /* timeouts since the last acknowledgement */
    double share;        /* of packets that were lost: a moving average over CL_LOSS_SHARE_PACKETS */
    bool any_acked;
    /* the packets declared lost most recently, to notice late acknowledgements of them */
    uint32_t recent_count;
    uint64_t recent_number[CL_LOSS_RECENT];
    struct cl_sent_packet recent[CL_LOSS_RECENT];
};

void cl_loss_init(struct cl_loss *loss);

typedef void (*cl_loss_fn)(void *argument, const struct cl_sent_packet *packet);

void cl_loss_on_acked(struct cl_loss *loss, uint64_t number, uint8_t class);
/* Takes the packets that are lost at now_us out of `sent`, calls lost() with each, and sets deadline_us. */
void cl_loss_detect(struct cl_loss *loss, struct cl_sent *sent, const struct cl_rtt *rtt, uint64_t now_us,
                    cl_loss_fn lost, void *argument);
/* Takes all packets out as lost: the path is given up. */
void cl_loss_give_up(struct cl_loss *loss, struct cl_sent *sent, cl_loss_fn lost, void *argument);
/* Calls late() with each recently lost packet that the frame acknowledges after all, and adapts the thresholds. */
void cl_loss_on_frame(struct cl_loss *loss, const struct cl_ack_frame *frame, cl_loss_fn late, void *argument);

/* Counts packets in `share`; cl_loss_on_frame takes late ones back out. */
void cl_loss_count(struct cl_loss *loss, uint32_t acked, uint32_t lost);
/* The time when the PTO fires; UINT64_MAX when nothing but PINGs is in flight. */
uint64_t cl_loss_pto_us(const struct cl_loss *loss, const struct cl_sent *sent, const struct cl_rtt *rtt);
