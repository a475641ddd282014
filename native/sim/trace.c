#include "sim/trace.h"

#include <stdarg.h>

#include "protocol/ack.h"
#include "protocol/packet.h"

static void say_time(struct sim_trace *trace)
{
    fprintf(trace->file, "%12.6f  ", (double)(trace->clock->now_ns - trace->origin_ns) / 1e9);
}

void sim_trace_say(struct sim_trace *trace, const char *format, ...)
{
    if (trace->file == NULL)
        return;
    say_time(trace);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(trace->file, format, arguments);
    va_end(arguments);
    fputc('\n', trace->file);
}

void sim_trace_datagram(struct sim_trace *trace, const char *what, const char *where, uint32_t from, uint32_t to,
                        const uint8_t *bytes, uint32_t length)
{
    static const char *const KINDS[CL_PACKET_KINDS] = {"DATA",  "ACK",  "PING",     "READY",   "ABORT", "MISMATCH",
                                                       "PROBE", "STOP", "FRAGMENT", "REQUEST", "GRANT"};
    if (trace->file == NULL)
        return;
    say_time(trace);
    fprintf(trace->file, "packet %-10s %3u > %-3u ", what, from, to);
    struct cl_packet packet;
    if (!cl_packet_decode(&packet, bytes, length)) {
        fprintf(trace->file, "%u bytes that are no packet", length);
    } else if (packet.kind == CL_PACKET_DATA) {
        fprintf(trace->file, "DATA #%u path %u  %u/%u/%u +%u %u bytes%s%s", packet.number, packet.path, packet.group,
                packet.sequence, packet.index, packet.offset, packet.length,
                packet.flags & CL_PACKET_LAST ? " last" : "", packet.flags & CL_PACKET_ACK_NOW ? " ack-now" : "");
    } else if (packet.kind == CL_PACKET_ACK) {
        fprintf(trace->file, "ACK #%u path %u  %u ranges, %u refused", packet.number, packet.path,
                cl_ack_came_count(&packet), cl_ack_refused_count(&packet));
    } else {
        fprintf(trace->file, "%s #%u path %u  %u/%u/%u", KINDS[packet.kind], packet.number, packet.path, packet.group,
                packet.sequence, packet.index);
    }
    fprintf(trace->file, "  %s\n", where);
}
