#include "protocol/fragments.h"

#include <stdlib.h>
#include <string.h>

#include "protocol/datagram.h"
#include "protocol/packet.h"

uint32_t cl_fragments_end(uint32_t length, uint32_t limit, uint32_t at)
{
    uint32_t room = (at ? limit : CL_HEAD_BYTES_MAX) - CL_PACKET_HEAD_BYTES;
    return length - at < room ? length : at + room;
}

uint32_t cl_fragments_count(uint32_t length, uint32_t limit)
{
    uint32_t count = 1;
    if (length > limit)
        for (uint32_t at = cl_fragments_end(length, limit, 0); at < length; at = cl_fragments_end(length, limit, at))
            count++;
    return count;
}

/* The whole of this number, or room for it. */
static struct cl_whole *find(struct cl_fragments *fragments, uint64_t number, uint32_t length)
{
    struct cl_whole *whole = &fragments->wholes[0];
    for (int i = 0; i < CL_FRAGMENTS_WHOLES; i++) {
        struct cl_whole *each = &fragments->wholes[i];
        if (each->length == length && each->number == number)
            return each;
        if (!each->length || (whole->length && each->turn < whole->turn))
            whole = each;
    }
    if (whole->capacity < length) {
        uint8_t *bytes = realloc(whole->bytes, length);
        if (bytes == NULL)
            return NULL;
        whole->bytes = bytes;
        whole->capacity = length;
    }
    cl_ranges_clear(&whole->came);
    whole->length = length;
    whole->number = number;
    whole->turn = fragments->turns++;
    whole->marked = false;
    return whole;
}

const struct cl_whole *cl_fragments_put(struct cl_fragments *fragments, uint64_t number, uint32_t length,
                                        struct cl_range place, const uint8_t *bytes, bool marked)
{
    struct cl_whole *whole = find(fragments, number, length);
    if (whole == NULL || !cl_ranges_add(&whole->came, place.start, place.end))
        return NULL;
    memcpy(whole->bytes + place.start, bytes, place.end - place.start);
    whole->marked = whole->marked || marked;
    if (whole->came.count > 1 || whole->came.list[0].end - whole->came.list[0].start < length)
        return NULL;
    whole->length = 0; /* free for the next */
    return whole;
}

void cl_fragments_free(struct cl_fragments *fragments)
{
    for (int i = 0; i < CL_FRAGMENTS_WHOLES; i++) {
        free(fragments->wholes[i].bytes);
        cl_ranges_free(&fragments->wholes[i].came);
    }
    *fragments = (struct cl_fragments){0};
}
