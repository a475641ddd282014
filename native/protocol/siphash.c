#include "protocol/siphash.h"

#include "protocol/bytes.h"

struct cl_siphash_key cl_siphash_key(const uint8_t bytes[CL_SIPHASH_KEY_BYTES])
{
    return (struct cl_siphash_key){cl_load_u64(bytes), cl_load_u64(bytes + 8)};
}

void cl_siphash_add(struct cl_siphash *hash, const uint8_t *bytes, size_t length)
{
    struct cl_siphash work = *hash; /* in registers */
    for (size_t at = 0; at < length; at += 8)
        cl_siphash_word(&work, cl_load_u64(bytes + at));
    *hash = work;
}

uint64_t cl_siphash_end(struct cl_siphash *hash, const uint8_t *bytes, size_t length)
{
    size_t whole = length & ~(size_t)7;
    cl_siphash_add(hash, bytes, whole);
    struct cl_siphash work = *hash;
    uint64_t rest = (work.length + length - whole) << 56;
    for (size_t i = whole; i < length; i++)
        rest |= (uint64_t)bytes[i] << 8 * (i - whole);
    return cl_siphash_finish(&work, rest);
}
