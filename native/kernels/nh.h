/*
 * NH: a fast hash with a key, for messages that a second function authenticates (Black, Halevi, Krawczyk, Krovetz and
 * Rogaway, "UMAC: Fast and Secure Message Authentication", CRYPTO 1999, section 4.2; RFC 4418 uses it, too). Of two
 * different blocks of one length, the chance over the keys that they have the same sum is at most 2^-32, whatever the
 * blocks are. Two sums with independent keys: 2^-64. The sums themselves must stay secret.
 *
 *   sum = of all pairs of 32-bit words: ((m[2i] + k[2i]) mod 2^32) * ((m[2i+1] + k[2i+1]) mod 2^32), mod 2^64
 *
 * A block that does not fill a chunk is padded with zeros, so the caller must authenticate the length.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
    CL_NH_BLOCK_BYTES = 1024,
    CL_NH_CHUNK_BYTES = 64,
    CL_NH_BLOCK_WORDS = CL_NH_BLOCK_BYTES / 4,
};

struct cl_nh_key {
    uint32_t words[2][CL_NH_BLOCK_WORDS];
};

/* The two sums of a block of at most CL_NH_BLOCK_BYTES. */
void cl_nh(uint64_t sums[2], const uint8_t *block, size_t length, const struct cl_nh_key *key);
