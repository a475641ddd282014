/*
 * SipHash-2-4 with a 64-bit result (Jean-Philippe Aumasson and Daniel J. Bernstein, "SipHash: a fast short-input PRF",
 * INDOCRYPT 2012, section 2): a keyed hash made for short inputs. Without the 128-bit key its results cannot be told
 * from random ones, so it can authenticate packets.
 *
 * The input comes in pieces: begin, then words or bytes, then end or finish. What every packet needs is inline, so that
 * the state stays in registers.
 */
#pragma once

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

static inline uint64_t cl_siphash_rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

/* SipRound, figure 2.1 of the paper */
static inline void cl_siphash_round(struct cl_siphash *hash)
{
    hash->v0 += hash->v1;
    hash->v2 += hash->v3;
    hash->v1 = cl_siphash_rotate(hash->v1, 13) ^ hash->v0;
    hash->v3 = cl_siphash_rotate(hash->v3, 16) ^ hash->v2;
    hash->v0 = cl_siphash_rotate(hash->v0, 32);
    hash->v2 += hash->v1;
    hash->v0 += hash->v3;
    hash->v1 = cl_siphash_rotate(hash->v1, 17) ^ hash->v2;
    hash->v3 = cl_siphash_rotate(hash->v3, 21) ^ hash->v0;
    hash->v2 = cl_siphash_rotate(hash->v2, 32);
}

static inline void cl_siphash_begin(struct cl_siphash *hash, const struct cl_siphash_key *key)
{
    /* the initial words spell "somepseudorandomlygeneratedbytes" */
    *hash = (struct cl_siphash){.v0 = key->k0 ^ 0x736f6d6570736575u,
                                .v1 = key->k1 ^ 0x646f72616e646f6du,
                                .v2 = key->k0 ^ 0x6c7967656e657261u,
                                .v3 = key->k1 ^ 0x7465646279746573u};
}

/* Adds 8 bytes, as the little-endian number they are. */
static inline void cl_siphash_word(struct cl_siphash *hash, uint64_t word)
{
    hash->v3 ^= word;
    cl_siphash_round(hash);
    cl_siphash_round(hash);
    hash->v0 ^= word;
    hash->length += 8;
}

/* length: a multiple of 8. */
void cl_siphash_add(struct cl_siphash *hash, const uint8_t *bytes, size_t length);

/* The result. rest: the bytes that do not fill a word, and how many there were in all in the highest byte. */
static inline uint64_t cl_siphash_finish(struct cl_siphash *hash, uint64_t rest)
{
    cl_siphash_word(hash, rest);
    hash->v2 ^= 0xFF;
    for (int i = 0; i < 4; i++)
        cl_siphash_round(hash);
    return hash->v0 ^ hash->v1 ^ hash->v2 ^ hash->v3;
}

/* Adds the last piece, of any length, and returns the result. */
uint64_t cl_siphash_end(struct cl_siphash *hash, const uint8_t *bytes, size_t length);
