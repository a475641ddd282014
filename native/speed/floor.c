/*
 * Floor: what one thread can do on this machine that sends, receives and adds packets over loopback UDP, as the engine
 * must, but without a protocol. The engine (loopback.c) cannot be faster.
 *
 *   floor [SEGMENTS [DATAGRAM_BYTES [SECONDS]]]
 *
 * SEGMENTS packets leave as one super-packet. Prints Gbit/s of payload each way per second of processor time, and by
 * the clock in the best batch.
 */
#include <arpa/inet.h>
#include <netinet/udp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum {
    HEAD_BYTES = 40,
    SEGMENTS_MAX = 64,
    SUPER_BYTES = 1 << 16,
    MEMORY_BYTES = 16 << 20, /* of the data sent, and of the sums: more than caches hold */
    SLOTS = 16,
    SENDS = 4, /* before each receive */
    BATCH = 4, /* receives */
    BUFFER_BYTES = 8 << 20,
};

union control {
    struct cmsghdr head; /* for alignment */
    uint8_t bytes[CMSG_SPACE(sizeof(uint16_t))];
};

static int to, from;
static struct sockaddr_in address = {.sin_family = AF_INET};
static size_t segments = 32, datagram_bytes = 1472, payload_bytes;
static uint8_t *data, *slots, heads[SEGMENTS_MAX][HEAD_BYTES];
static float *sums;
static size_t read_at, add_at;
static uint64_t received;

static double seconds_of(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void open_sockets(void)
{
    int size = BUFFER_BYTES, on = 1;
    socklen_t length = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to = socket(AF_INET, SOCK_DGRAM, 0);
    from = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    if (bind(from, (struct sockaddr *)&address, length) != 0 ||
        getsockname(from, (struct sockaddr *)&address, &length) != 0 ||
        setsockopt(from, IPPROTO_UDP, UDP_GRO, &on, sizeof on) != 0) {
        perror("floor");
        exit(1);
    }
    if (setsockopt(from, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) != 0)
        setsockopt(from, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

static void send_one(void)
{
    struct iovec pieces[2 * SEGMENTS_MAX];
    for (size_t i = 0; i < segments; i++) {
        memset(heads[i], (int)i, HEAD_BYTES);
        pieces[2 * i] = (struct iovec){heads[i], HEAD_BYTES};
        pieces[2 * i + 1] = (struct iovec){data + read_at, payload_bytes};
        read_at = (read_at + payload_bytes) % (MEMORY_BYTES - SUPER_BYTES);
    }
    union control control = {
        .head = {.cmsg_level = IPPROTO_UDP, .cmsg_type = UDP_SEGMENT, .cmsg_len = CMSG_LEN(sizeof(uint16_t))}};
    uint16_t size = (uint16_t)datagram_bytes;
    memcpy(CMSG_DATA(&control.head), &size, sizeof size);
    struct msghdr message = {.msg_name = &address,
                             .msg_namelen = sizeof address,
                             .msg_iov = pieces,
                             .msg_iovlen = 2 * segments,
                             .msg_control = segments > 1 ? &control : NULL,
                             .msg_controllen = segments > 1 ? sizeof control : 0};
    if (sendmsg(to, &message, 0) < 0) {
        perror("floor: sendmsg");
        exit(1);
    }
}

static void add(const uint8_t *payload)
{
    float *target = sums + add_at;
    const float *source = (const float *)(const void *)payload;
    for (size_t i = 0; i < payload_bytes / sizeof(float); i++)
        target[i] += source[i];
    add_at = (add_at + payload_bytes / sizeof(float)) % ((MEMORY_BYTES - SUPER_BYTES) / sizeof(float));
}

static void receive_all(void)
{
    int count;
    do {
        struct mmsghdr messages[SLOTS];
        struct iovec pieces[SLOTS];
        uint8_t controls[SLOTS][CMSG_SPACE(sizeof(int))];
        for (size_t i = 0; i < SLOTS; i++) {
            pieces[i] = (struct iovec){slots + i * SUPER_BYTES, SUPER_BYTES};
            messages[i].msg_hdr = (struct msghdr){.msg_iov = &pieces[i],
                                                  .msg_iovlen = 1,
                                                  .msg_control = controls[i],
                                                  .msg_controllen = sizeof controls[i]};
        }
        count = recvmmsg(from, messages, SLOTS, MSG_DONTWAIT, NULL);
        for (int i = 0; i < count; i++)
            for (size_t at = 0; at < messages[i].msg_len; at += datagram_bytes, received++)
                add(slots + (size_t)i * SUPER_BYTES + at + HEAD_BYTES);
    } while (count == SLOTS);
}

int main(int count, char **arguments)
{
    if (count > 1)
        segments = (size_t)atoi(arguments[1]);
    if (count > 2)
        datagram_bytes = (size_t)atoi(arguments[2]);
    double seconds = count > 3 ? atof(arguments[3]) : 2;
    if (segments < 1 || segments > SEGMENTS_MAX || datagram_bytes <= HEAD_BYTES ||
        segments * datagram_bytes >= SUPER_BYTES) {
        fprintf(stderr, "floor: %zu packets of %zu bytes are no super-packet of 1 to %d packets and less than 64 KiB\n",
                segments, datagram_bytes, SEGMENTS_MAX);
        return 2;
    }
    payload_bytes = (datagram_bytes - HEAD_BYTES) / sizeof(float) * sizeof(float);
    data = calloc(1, MEMORY_BYTES);
    sums = calloc(1, MEMORY_BYTES);
    slots = calloc(SLOTS, SUPER_BYTES);
    open_sockets();
    double start_s = seconds_of(CLOCK_MONOTONIC), end_s, cpu_s = seconds_of(CLOCK_THREAD_CPUTIME_ID), best = 0;
    do {
        uint64_t before = received;
        double before_s = seconds_of(CLOCK_MONOTONIC);
        for (int i = 0; i < BATCH; i++) {
            for (int j = 0; j < SENDS; j++)
                send_one();
            receive_all();
        }
        end_s = seconds_of(CLOCK_MONOTONIC);
        double rate = (double)(received - before) / (end_s - before_s);
        best = rate > best ? rate : best;
    } while (end_s - start_s < seconds);
    double bits = (double)payload_bytes * 8;
    cpu_s = seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu_s;
    printf("floor, %zu datagrams of %zu at once: %.1f Gbit/s each way per second of CPU, %.1f by the clock at best, "
           "%.0f ns per packet both ways\n",
           segments, datagram_bytes, (double)received * bits / cpu_s / 1e9, best * bits / 1e9,
           cpu_s / (double)received * 1e9);
    return 0;
}
