/*
 * Interface: the network interfaces of this host whose addresses peers could reach.
 */
#include "commlayer.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* Copies an IP address; returns its length in bytes, 0 for other families. */
static size_t copy_address(const struct sockaddr *from, uint8_t to[16])
{
    if (from != NULL && from->sa_family == AF_INET) {
        memcpy(to, (const uint8_t *)from + offsetof(struct sockaddr_in, sin_addr), 4);
        return 4;
    }
    if (from != NULL && from->sa_family == AF_INET6) {
        memcpy(to, (const uint8_t *)from + offsetof(struct sockaddr_in6, sin6_addr), 16);
        return 16;
    }
    return 0;
}

static uint32_t prefix_bits(const struct sockaddr *mask)
{
    uint8_t bytes[16];
    size_t count = copy_address(mask, bytes);
    uint32_t bits = 0;
    for (size_t i = 0; i < count; i++)
        bits += (uint32_t)__builtin_popcount(bytes[i]);
    return bits;
}

static uint32_t interface_mtu(const char *name)
{
    struct ifreq request;
    memset(&request, 0, sizeof request);
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    uint32_t mtu = 1500;
    if (fd >= 0 && ioctl(fd, SIOCGIFMTU, &request) == 0)
        mtu = (uint32_t)request.ifr_mtu;
    if (fd >= 0)
        close(fd);
    return mtu;
}

int cl_interfaces(struct cl_interface *out, uint32_t capacity)
{
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0)
        return CL_ESYSTEM;
    uint32_t count = 0;
    for (struct ifaddrs *i = all; i != NULL && count < capacity; i = i->ifa_next) {
        if (i->ifa_addr == NULL || (i->ifa_flags & IFF_UP) == 0)
            continue;
        struct cl_interface *interface = &out[count];
        struct in6_addr address; /* or, in its first bytes, one of IPv4 */
        size_t length = copy_address(i->ifa_addr, address.s6_addr);
        if (length == 0 || (length == 16 && IN6_IS_ADDR_LINKLOCAL(&address)))
            continue; /* a link-local address would need a scope on every use */
        inet_ntop(i->ifa_addr->sa_family, &address, interface->address, sizeof interface->address);
        snprintf(interface->name, sizeof interface->name, "%s", i->ifa_name);
        interface->prefix_bits = prefix_bits(i->ifa_netmask);
        interface->mtu = interface_mtu(i->ifa_name);
        interface->is_loopback = (i->ifa_flags & IFF_LOOPBACK) != 0;
        interface->is_running = (i->ifa_flags & IFF_RUNNING) != 0;
        interface->is_ipv6 = i->ifa_addr->sa_family == AF_INET6;
        count++;
    }
    freeifaddrs(all);
    return (int)count;
}
