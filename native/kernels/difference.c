#include "kernels/difference.h"

#include <stdbool.h>
#include <string.h>

#include "commlayer.h"
#include "kernels/level.h"

#define ALWAYS static inline __attribute__((always_inline))

enum {
    SIGN = 1 << 15,   /* a bit of a place: the change is negative; places are below it */
    MOST_ORDER = 15,  /* the largest order of a Rice code, as its head has 4 bits */
    TAKEN_BITS = 56,  /* that `refill` makes available, unless the code ends */
    LENGTHS = 64 + 1, /* lengths of numbers in bits */
    BLOCK_HEAD_BYTES = 6,
};

ALWAYS uint64_t load(const uint8_t *from, unsigned width)
{
    uint64_t value = 0;
    memcpy(&value, from, width); /* of a little-endian machine, as all the engine's are */
    return value;
}

ALWAYS void store(uint8_t *to, uint64_t value, unsigned width)
{
    memcpy(to, &value, width);
}

ALWAYS uint64_t mask_of(unsigned width)
{
    return UINT64_MAX >> (64 - 8 * width);
}

static unsigned length_of(uint64_t number)
{
    return number == 0 ? 0 : 64 - (unsigned)__builtin_clzll(number);
}

/* ---- bits ---- */

struct writer {
    uint8_t *at;
    uint64_t held; /* bits that are not written yet, fewer than 8 between calls */
    unsigned count;
};

/* length: at most TAKEN_BITS; `bits` has no others. */
ALWAYS void put(struct writer *writer, uint64_t bits, unsigned length)
{
    writer->held |= bits << writer->count;
    writer->count += length;
    memcpy(writer->at, &writer->held, 8);
    writer->at += writer->count / 8;
    writer->held >>= writer->count & ~7u;
    writer->count &= 7;
}

static void put_long(struct writer *writer, uint64_t bits, unsigned length)
{
    put(writer, bits & 0xFFFFFFFF, length < 32 ? length : 32);
    if (length > 32)
        put(writer, bits >> 32, length - 32);
}

static void put_zeros(struct writer *writer, uint64_t length)
{
    for (; length > 32; length -= 32)
        put(writer, 0, 32);
    put(writer, 0, (unsigned)length);
}

struct reader {
    const uint8_t *at, *end;
    uint64_t held;
    unsigned count;
};

/* Makes TAKEN_BITS available, or all that are left. */
ALWAYS void refill(struct reader *reader)
{
    if (reader->end - reader->at >= 8) {
        uint64_t next;
        memcpy(&next, reader->at, 8);
        reader->held |= next << reader->count;
        reader->at += (63 - reader->count) / 8;
        reader->count |= TAKEN_BITS;
        return;
    }
    while (reader->count < TAKEN_BITS && reader->at < reader->end) {
        reader->held |= (uint64_t)*reader->at++ << reader->count;
        reader->count += 8;
    }
}

ALWAYS void drop(struct reader *reader, unsigned length)
{
    reader->held >>= length;
    reader->count -= length;
}

/* length: at most 64. */
static bool take(struct reader *reader, unsigned length, uint64_t *bits)
{
    *bits = 0;
    for (unsigned done = 0, part; done < length; done += part) {
        part = length - done < 32 ? length - done : 32;
        refill(reader);
        if (reader->count < part)
            return false;
        *bits |= (reader->held & ((1ull << part) - 1)) << done;
        drop(reader, part);
    }
    return true;
}

/* Zeros up to a one, at most `most`. */
static bool take_zeros(struct reader *reader, uint64_t most, uint64_t *zeros)
{
    *zeros = 0;
    for (;;) {
        refill(reader);
        if (reader->count == 0)
            return false;
        uint64_t bits = reader->held & (UINT64_MAX >> (64 - reader->count));
        unsigned run = bits == 0 ? reader->count : (unsigned)__builtin_ctzll(bits);
        *zeros += run;
        if (*zeros > most)
            return false;
        if (bits != 0) {
            drop(reader, run + 1);
            return true;
        }
        reader->held = 0;
        reader->count = 0;
    }
}

/* ---- codes of numbers ---- */

/* The order at which a Rice code of `count` numbers with this sum is short: 2^order is near ln 2 times their mean. */
static unsigned rice_order(uint64_t sum, uint64_t count)
{
    unsigned order = 0;
    while (order < MOST_ORDER && (count << order) * 10 < sum * 7)
        order++;
    return order;
}

ALWAYS void put_rice(struct writer *writer, uint64_t number, unsigned order)
{
    uint64_t zeros = number >> order, tail = 1 | (number & ((1ull << order) - 1)) << 1;
    if (zeros + order + 1 > TAKEN_BITS) {
        put_zeros(writer, zeros);
        zeros = 0;
    }
    put(writer, tail << zeros, (unsigned)zeros + order + 1);
}

/* A number of at most `most`, which is below 2^16. */
static bool take_rice(struct reader *reader, unsigned order, uint64_t most, uint64_t *number)
{
    uint64_t zeros, tail;
    if (!take_zeros(reader, most >> order, &zeros) || !take(reader, order, &tail))
        return false;
    *number = zeros << order | tail;
    return *number <= most;
}

/* number + 1 < 2^64. */
static void put_golomb(struct writer *writer, uint64_t number, unsigned order)
{
    uint64_t head = (number >> order) + 1;
    unsigned length = length_of(head);
    put_long(writer, 0, length - 1);
    put(writer, 1, 1);
    put_long(writer, head ^ 1ull << (length - 1), length - 1);
    put_long(writer, number & ((1ull << order) - 1), order);
}

static bool take_golomb(struct reader *reader, unsigned order, uint64_t *number)
{
    uint64_t zeros, head, tail;
    if (!take_zeros(reader, 63, &zeros) || !take(reader, (unsigned)zeros, &head) || !take(reader, order, &tail))
        return false;
    head |= 1ull << zeros;
    if (zeros + order > 63)
        return false;
    *number = ((head - 1) << order) | tail;
    return true;
}

/* The best order for numbers of which lengths[i] have i bits, and a bound of the bits that it takes. */
static unsigned golomb_order(const uint32_t lengths[LENGTHS], uint64_t *bits)
{
    unsigned best = 0;
    *bits = UINT64_MAX;
    for (unsigned order = 0; order < 63; order++) {
        uint64_t cost = 0;
        for (unsigned i = 0; i < LENGTHS; i++)
            cost += lengths[i] * (uint64_t)(1 + order + (i > order ? 2 * (i - order) : 0));
        if (cost < *bits) {
            *bits = cost;
            best = order;
        }
    }
    return best;
}

/* ---- blocks ---- */

struct block {
    size_t count, changes, large;
    uint16_t places[CL_DIFFERENCE_VALUES + 2]; /* places with SIGN */
    uint16_t large_ones[CL_DIFFERENCE_VALUES]; /* which of the changes */
    uint32_t lengths[LENGTHS];                 /* how many magnitudes less 2 have each length */
    unsigned gap_order, run_order, magnitude_order;
    uint64_t bits; /* a bound of those of the code */
};

ALWAYS uint64_t magnitude_at(const uint8_t *base, const uint8_t *values, size_t place, unsigned width, bool *is_less)
{
    uint64_t change = load(values + place * width, width) - load(base + place * width, width);
    *is_less = change >> (8 * width - 1) & 1;
    return (*is_less ? 0 - change : change) & mask_of(width);
}

/* Signs the places, lists the large changes, and chooses the orders. */
ALWAYS void survey(struct block *block, const uint8_t *base, const uint8_t *values, unsigned width)
{
    size_t large = 0;
    memset(block->lengths, 0, sizeof block->lengths);
    uint64_t last = block->places[block->changes - 1], gaps = last + 1 - block->changes;
    for (size_t i = 0; i < block->changes; i++) {
        bool is_less;
        uint64_t magnitude = magnitude_at(base, values, block->places[i], width, &is_less);
        block->places[i] = (uint16_t)(block->places[i] | (is_less ? SIGN : 0));
        block->large_ones[large] = (uint16_t)i;
        large += magnitude != 1;
    }
    for (size_t i = 0; i < large; i++) {
        bool is_less;
        size_t place = block->places[block->large_ones[i]] & (SIGN - 1);
        block->lengths[length_of(magnitude_at(base, values, place, width, &is_less) - 2)]++;
    }
    block->large = large;
    block->gap_order = rice_order(gaps, block->changes);
    block->bits = block->changes * (block->gap_order + 2) + (gaps >> block->gap_order);
    block->run_order = block->magnitude_order = 0;
    if (large > 0) {
        uint64_t magnitudes, runs = block->large_ones[large - 1] + 1u - large;
        block->run_order = rice_order(runs, large);
        block->magnitude_order = golomb_order(block->lengths, &magnitudes);
        block->bits += large * (block->run_order + 1) + (runs >> block->run_order) + magnitudes;
    }
}

ALWAYS uint8_t *write_changes(const struct block *block, const uint8_t *base, const uint8_t *values, unsigned width,
                              uint8_t *code)
{
    store(code, block->changes, 2);
    code[2] = (uint8_t)(block->gap_order | block->run_order << 4);
    store(code + 3, block->large, 2);
    code[5] = (uint8_t)block->magnitude_order;
    struct writer writer = {.at = code + (block->large > 0 ? 6 : 5)};
    size_t next = 0;
    for (size_t i = 0; i < block->changes; i++) {
        size_t place = block->places[i] & (SIGN - 1), order = block->gap_order, gap = place - next;
        uint64_t zeros = gap >> order, tail = 1 | (gap & ((1ull << order) - 1)) << 1;
        tail |= (uint64_t)(block->places[i] >> 15) << (order + 1);
        if (zeros + order + 2 > TAKEN_BITS) {
            put_zeros(&writer, zeros);
            zeros = 0;
        }
        put(&writer, tail << zeros, (unsigned)(zeros + order + 2));
        next = place + 1;
    }
    next = 0;
    for (size_t i = 0; i < block->large; i++) {
        bool is_less;
        size_t which = block->large_ones[i], place = block->places[which] & (SIGN - 1);
        put_rice(&writer, which - next, block->run_order);
        put_golomb(&writer, magnitude_at(base, values, place, width, &is_less) - 2, block->magnitude_order);
        next = which + 1;
    }
    if (writer.count > 0)
        put(&writer, 0, 8 - writer.count);
    return writer.at;
}

ALWAYS uint8_t *write_plain(const uint8_t *base, const uint8_t *values, size_t count, unsigned width, uint8_t *code)
{
    store(code, CL_DIFFERENCE_PLAIN, 2);
    code += 2;
    for (size_t i = 0; i < count; i++, code += width)
        store(code, load(values + i * width, width) - load(base + i * width, width), width);
    return code;
}

/* The end of the block's code, or NULL if there may be no room for it before `end`. */
ALWAYS uint8_t *encode_block(struct block *block, const uint8_t *base, const uint8_t *values, unsigned width,
                             uint8_t *code, const uint8_t *end)
{
    size_t room = (size_t)(end - code), plain = block->count * width;
    block->changes = cl_level_current()->changed(block->places, base, values, block->count, width);
    if (room < BLOCK_HEAD_BYTES)
        return NULL;
    if (block->changes == 0) {
        store(code, 0, 2);
        return code + 2;
    }
    survey(block, base, values, width);
    size_t coded = BLOCK_HEAD_BYTES + block->bits / 8 + 1;
    if (coded < plain + 2)
        return coded <= room ? write_changes(block, base, values, width, code) : NULL;
    return plain + 2 <= room ? write_plain(base, values, block->count, width, code) : NULL;
}

ALWAYS int64_t encode(const uint8_t *base, const uint8_t *values, uint64_t count, unsigned width, uint8_t *code,
                      uint64_t capacity)
{
    struct block block;
    uint8_t *at = code;
    for (uint64_t first = 0; first < count; first += block.count) {
        block.count = count - first < CL_DIFFERENCE_VALUES ? (size_t)(count - first) : CL_DIFFERENCE_VALUES;
        at = encode_block(&block, base + first * width, values + first * width, width, at,
                          code + capacity - CL_DIFFERENCE_SLACK);
        if (at == NULL)
            return CL_EAGAIN;
    }
    return at - code;
}

int64_t cl_difference_encode(const void *base, const void *values, uint64_t count, uint32_t value_bytes, void *code,
                             uint64_t capacity)
{
    if (capacity < CL_DIFFERENCE_SLACK)
        return CL_EAGAIN;
    switch (value_bytes) {
    case 1:
        return encode(base, values, count, 1, code, capacity);
    case 2:
        return encode(base, values, count, 2, code, capacity);
    case 4:
        return encode(base, values, count, 4, code, capacity);
    case 8:
        return encode(base, values, count, 8, code, capacity);
    default:
        return CL_EINVAL;
    }
}

ALWAYS void change(uint8_t *values, size_t place, unsigned width, uint64_t magnitude, bool is_less)
{
    uint64_t value = load(values + place * width, width);
    store(values + place * width, is_less ? value - magnitude : value + magnitude, width);
}

/* Changes each value by one, and notes the places of the changes. */
ALWAYS bool apply_changes(struct reader *reader, uint8_t *values, size_t count, unsigned width, unsigned order,
                          bool is_back, uint16_t *places, size_t changes)
{
    size_t next = 0;
    for (size_t i = 0; i < changes; i++) {
        uint64_t gap, sign;
        refill(reader);
        unsigned zeros = reader->held == 0 ? 64 : (unsigned)__builtin_ctzll(reader->held);
        if (zeros + order + 2 <= reader->count) {
            uint64_t rest = reader->held >> zeros >> 1;
            gap = (uint64_t)zeros << order | (rest & ((1ull << order) - 1));
            sign = rest >> order & 1;
            reader->held = rest >> order >> 1;
            reader->count -= zeros + order + 2;
        } else if (!take_rice(reader, order, count, &gap) || !take(reader, 1, &sign)) {
            return false;
        }
        if (gap >= count - next)
            return false;
        next += gap;
        places[i] = (uint16_t)(next | sign << 15);
        change(values, next, width, 1, is_back != (sign != 0));
        next++;
    }
    return true;
}

/* The rest of the large changes. */
ALWAYS bool apply_large(struct reader *reader, uint8_t *values, unsigned width, unsigned run_order,
                        unsigned magnitude_order, bool is_back, const uint16_t *places, size_t changes, size_t large)
{
    size_t next = 0;
    for (size_t i = 0; i < large; i++) {
        uint64_t run, magnitude;
        if (next >= changes || !take_rice(reader, run_order, changes - next - 1, &run) ||
            !take_golomb(reader, magnitude_order, &magnitude))
            return false;
        next += run;
        change(values, places[next] & (SIGN - 1), width, magnitude + 1, is_back != (places[next] >= SIGN));
        next++;
    }
    return true;
}

/* The end of the block's code, or NULL if it is none. `places` has room for all. */
ALWAYS const uint8_t *apply_block(uint8_t *values, size_t count, unsigned width, const uint8_t *code,
                                  const uint8_t *end, bool is_back, uint16_t *places)
{
    if (end - code < 2)
        return NULL;
    size_t changes = load(code, 2), large;
    code += 2;
    if (changes == CL_DIFFERENCE_PLAIN) {
        if ((size_t)(end - code) < count * width)
            return NULL;
        for (size_t i = 0; i < count; i++, code += width)
            change(values, i, width, load(code, width), is_back);
        return code;
    }
    if (changes == 0)
        return code;
    if (changes > count || end - code < 3)
        return NULL;
    unsigned gap_order = code[0] & 15, run_order = code[0] >> 4, magnitude_order = 0;
    large = load(code + 1, 2);
    code += 3;
    if (large > 0) {
        if (code == end || *code > 62)
            return NULL;
        magnitude_order = *code++;
    }
    struct reader reader = {.at = code, .end = end};
    if (!apply_changes(&reader, values, count, width, gap_order, is_back, places, changes) ||
        !apply_large(&reader, values, width, run_order, magnitude_order, is_back, places, changes, large))
        return NULL;
    /* Whole bytes that were read ahead go back. */
    return reader.at - reader.count / 8;
}

ALWAYS int apply(uint8_t *values, uint64_t count, unsigned width, const uint8_t *code, uint64_t length, bool is_back)
{
    uint16_t places[CL_DIFFERENCE_VALUES];
    const uint8_t *end = code + length;
    for (uint64_t first = 0; first < count; first += CL_DIFFERENCE_VALUES) {
        size_t part = count - first < CL_DIFFERENCE_VALUES ? (size_t)(count - first) : CL_DIFFERENCE_VALUES;
        code = apply_block(values + first * width, part, width, code, end, is_back, places);
        if (code == NULL)
            return CL_EINVAL;
    }
    return code == end ? CL_OK : CL_EINVAL;
}

int cl_difference_apply(void *values, uint64_t count, uint32_t value_bytes, const void *code, uint64_t length,
                        int32_t is_back)
{
    switch (value_bytes) {
    case 1:
        return apply(values, count, 1, code, length, is_back != 0);
    case 2:
        return apply(values, count, 2, code, length, is_back != 0);
    case 4:
        return apply(values, count, 4, code, length, is_back != 0);
    case 8:
        return apply(values, count, 8, code, length, is_back != 0);
    default:
        return CL_EINVAL;
    }
}
