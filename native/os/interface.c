/*
 * Interfaces: the addresses of this host that peers could reach.
 */
#include "commlayer.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static uint32_t prefix_bits(const struct sockaddr *mask)
{
    const uint8_t *bytes = NULL;
    size_t count = 0;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    if (mask == NULL)
        return 0;
    if (mask->sa_family == AF_INET) {
        memcpy(&v4, mask, sizeof v4);
        bytes = (const uint8_t *)&v4.sin_addr;
        count = 4;
    } else if (mask->sa_family == AF_INET6) {
        memcpy(&v6, mask, sizeof v6);
        bytes = (const uint8_t *)&v6.sin6_addr;
        count = 16;
    }
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
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        if (i->ifa_addr->sa_family == AF_INET) {
            memcpy(&v4, i->ifa_addr, sizeof v4);
            inet_ntop(AF_INET, &v4.sin_addr, interface->address, sizeof interface->address);
        } else if (i->ifa_addr->sa_family == AF_INET6) {
            memcpy(&v6, i->ifa_addr, sizeof v6);
            if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr))
                continue; /* would need a scope on every use */
            inet_ntop(AF_INET6, &v6.sin6_addr, interface->address, sizeof interface->address);
        } else {
            continue;
        }
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
