#include "core/siphash.h"

static inline uint64_t load_u64(const uint8_t *p)
{
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 | (uint64_t)p[4] << 32 |
           (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 | (uint64_t)p[7] << 56;
}

static inline uint64_t rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

/* SipRound, figure 2.1 of the paper */
static inline void round_once(struct cl_siphash *hash)
{
    hash->v0 += hash->v1;
    hash->v2 += hash->v3;
    hash->v1 = rotate(hash->v1, 13) ^ hash->v0;
    hash->v3 = rotate(hash->v3, 16) ^ hash->v2;
    hash->v0 = rotate(hash->v0, 32);
    hash->v2 += hash->v1;
    hash->v0 += hash->v3;
    hash->v1 = rotate(hash->v1, 17) ^ hash->v2;
    hash->v3 = rotate(hash->v3, 21) ^ hash->v0;
    hash->v2 = rotate(hash->v2, 32);
}

static inline void compress(struct cl_siphash *hash, uint64_t word)
{
    hash->v3 ^= word;
    round_once(hash);
    round_once(hash);
    hash->v0 ^= word;
}

struct cl_siphash_key cl_siphash_key(const uint8_t bytes[CL_SIPHASH_KEY_BYTES])
{
    return (struct cl_siphash_key){load_u64(bytes), load_u64(bytes + 8)};
}

void cl_siphash_begin(struct cl_siphash *hash, const struct cl_siphash_key *key)
{
    /* the initial words spell "somepseudorandomlygeneratedbytes" */
    *hash = (struct cl_siphash){.v0 = key->k0 ^ 0x736f6d6570736575u,
                                .v1 = key->k1 ^ 0x646f72616e646f6du,
                                .v2 = key->k0 ^ 0x6c7967656e657261u,
                                .v3 = key->k1 ^ 0x7465646279746573u};
}

void cl_siphash_add(struct cl_siphash *hash, const uint8_t *bytes, size_t length)
{
    struct cl_siphash work = *hash; /* in registers */
    for (size_t at = 0; at < length; at += 8)
        compress(&work, load_u64(bytes + at));
    work.length += length;
    *hash = work;
}

uint64_t cl_siphash_end(struct cl_siphash *hash, const uint8_t *bytes, size_t length)
{
    size_t whole = length & ~(size_t)7;
    cl_siphash_add(hash, bytes, whole);
    struct cl_siphash work = *hash;
    uint64_t last = (work.length + length - whole) << 56;
    for (size_t i = whole; i < length; i++)
        last |= (uint64_t)bytes[i] << 8 * (i - whole);
    compress(&work, last);
    work.v2 ^= 0xFF;
    for (int i = 0; i < 4; i++)
        round_once(&work);
    return work.v0 ^ work.v1 ^ work.v2 ^ work.v3;
}
