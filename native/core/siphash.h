/*
 * SipHash-2-4 with a 64-bit result (Jean-Philippe Aumasson and Daniel J. Bernstein, "SipHash: a fast short-input PRF",
 * INDOCRYPT 2012, section 2): a keyed hash made for short inputs. Without the 128-bit key its results cannot be told
 * from random ones, so it can authenticate packets.
 *
 * The input may come in pieces: begin, add any number of times, end.
 */
#ifndef CL_CORE_SIPHASH_H
#define CL_CORE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

enum { CL_SIPHASH_KEY_BYTES = 16 };

struct cl_siphash_key {
    uint64_t k0, k1;
};

struct cl_siphash {
    uint64_t v0, v1, v2, v3;
    uint64_t length; /* bytes so far */
};

struct cl_siphash_key cl_siphash_key(const uint8_t bytes[CL_SIPHASH_KEY_BYTES]);

void cl_siphash_begin(struct cl_siphash *hash, const struct cl_siphash_key *key);
/* length: a multiple of 8. */
void cl_siphash_add(struct cl_siphash *hash, const uint8_t *bytes, size_t length);
/* Adds the last piece, of any length, and returns the result. */
uint64_t cl_siphash_end(struct cl_siphash *hash, const uint8_t *bytes, size_t length);

#endif
