/* Bytes: numbers of packets in memory, little-endian at any address. */
#pragma once

#include <stdint.h>

static inline uint16_t cl_load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline uint32_t cl_load_u32(const uint8_t *p)
{
    return cl_load_u16(p) | (uint32_t)cl_load_u16(p + 2) << 16;
}

static inline uint64_t cl_load_u64(const uint8_t *p)
{
    return cl_load_u32(p) | (uint64_t)cl_load_u32(p + 4) << 32;
}

static inline void cl_store_u16(uint8_t *p, uint32_t value)
{
    p[0] = (uint8_t)value;
    p[1] = (uint8_t)(value >> 8);
}

static inline void cl_store_u32(uint8_t *p, uint32_t value)
{
    cl_store_u16(p, value);
    cl_store_u16(p + 2, value >> 16);
}
