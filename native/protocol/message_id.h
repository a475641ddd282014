/* Message id: the name of a message between two peers. */
#pragma once

#include <stdint.h>

#define CL_GROUP_P2P 0x80000000u /* this bit in a group's id names its point-to-point messages */

struct cl_message_id {
    uint32_t group;
    uint32_t sequence; /* the operation within the group; point-to-point: the tag */
    uint32_t index;    /* counts messages of the operation or tag per (sender, receiver) pair */
};
