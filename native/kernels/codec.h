/*
 * Codec: a shorter representation of f32 values, in blocks. A block is encoded and decoded by itself: packets that hold
 * whole blocks may be lost, reordered and repeated, and a block that is encoded again from the same values has the same
 * bits. All instruction-set levels give the same bits.
 *
 * | codec | values per block | bytes per block | error of a value |
 * |---|---|---|---|
 * | f16, bf16 | 1 | 2 | half a unit in the last place, nearest even; f16 overflows to infinity |
 * | int8 | 64 | 2 + 64 | at most half a step; a step is 1/127 of the block's largest magnitude, rounded up to bf16 |
 * | int4 | 256 | 2 + 128 | mean squared error about 0.0125 of the mean square of the block's values, at most 0.03 |
 * | sign | 128 | 2 + 16 | mean squared error of Gaussian values about 0.363 of their mean square (1 - 2 / pi) |
 *
 * int8, int4 and sign store one bf16 scale per block, that of int4 divided by 16. int8 and int4 round to nearest. int4
 * first rotates the block: it multiplies the values by random signs and applies the orthonormal Walsh-Hadamard
 * transform, which spreads outliers over the block (Suresh et al., "Distributed mean estimation with limited
 * communication", ICML 2017). The signs come from a counter generator keyed by (key, number of the block), so that
 * the decoders derive those of the encoder. In the mean over keys, int4 shrinks a block by 0.2 % (one of a single value
 * other than 0: by 7 %) and has no other bias. Values of int4 that would be decoded to more than the largest float are
 * limited to it.
 *
 * sign keeps the sign of each value. The scale is the mean magnitude of the block's values, rounded to the nearest
 * bf16: the mean has the least squared error of all scales. A zero (also -0) in a block with other values decodes to
 * plus the scale.
 *
 * A block of int8, int4 or sign with a value that is not finite decodes to NaN as a whole. A block whose largest
 * magnitude (sign: mean magnitude) is below 2^-100 decodes to zeros. A last block that is not full is padded with zeros
 * and sent whole; the mean of sign leaves the padding out.
 */
#pragma once

#include "commlayer.h"

/* Which block of which bucket in which step: rotations of different blocks are independent. */
struct cl_codec_place {
    uint64_t key;   /* made of the operation and the encoding rank (cl_codec_key) */
    uint64_t block; /* number of the first block */
};

enum cl_codec_kind { CL_CODEC_F16, CL_CODEC_BF16, CL_CODEC_INT8, CL_CODEC_INT4, CL_CODEC_SIGN, CL_CODECS };

enum {
    CL_CODEC_PART_VALUES = 4096,    /* the executor encodes parts of so many values, which are whole blocks */
    CL_CODEC_BLOCK_BYTES_MAX = 488, /* a packet holds whole blocks: its payload with the least setting of `mtu`, 576:
                                       without 48 bytes for IPv6 and UDP, and 40 for the header */
};

/* What a block must be: so many values, encoded in so many bytes. */
#define CL_CODEC_BLOCK_FITS(values, bytes)                                                                             \
    _Static_assert(CL_CODEC_PART_VALUES % (values) == 0, "CL_CODEC_PART_VALUES values are whole blocks");              \
    _Static_assert((bytes) <= CL_CODEC_BLOCK_BYTES_MAX, "a packet has room for a block")

struct cl_codec {
    const char *name;
    uint32_t block_values, block_bytes;
    void (*encode)(uint8_t *target, const float *source, size_t count, struct cl_codec_place place);
    void (*decode)(float *target, const uint8_t *source, size_t count, struct cl_codec_place place);
    /* Adds the decoded values to `target`. */
    void (*decode_add)(float *target, const uint8_t *source, size_t count, struct cl_codec_place place);
};

/* The fastest variant this machine has; NULL for an unknown codec. */
const struct cl_codec *cl_codec_of(enum cl_codec_kind kind);

/* kept[i] = (source[i] - decoded[i]) * factor: the error of encoded values. */
void cl_codec_keep_error(float *kept, const float *source, const float *decoded, size_t count, float factor);

/* Encoded bytes of `count` values. */
static inline size_t cl_codec_bytes(const struct cl_codec *codec, size_t count)
{
    return (count + codec->block_values - 1) / codec->block_values * codec->block_bytes;
}
