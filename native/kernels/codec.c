#include "kernels/codec.h"

#include "kernels/float_mode.h"
#include "kernels/level.h"

const struct cl_codec *cl_codec_of(enum cl_codec_kind kind)
{
    return (unsigned)kind < CL_CODECS ? &cl_level_current()->codecs[kind] : NULL;
}

void cl_codec_keep_error(float *kept, const float *source, const float *decoded, size_t count, float factor)
{
    CL_IEEE_ARITHMETIC;
    for (size_t i = 0; i < count; i++)
        kept[i] = (source[i] - decoded[i]) * factor;
}

uint64_t cl_codec_key(uint64_t codec_key, uint32_t rank)
{
    return codec_key + rank * 0x9E3779B97F4A7C15u;
}

int cl_encode(uint32_t codec, void *target, const float *source, uint64_t count, uint64_t key, uint64_t block)
{
    const struct cl_codec *found = codec > 0 ? cl_codec_of((enum cl_codec_kind)(codec - 1)) : NULL;
    if (found == NULL)
        return CL_EINVAL;
    found->encode(target, source, count, (struct cl_codec_place){key, block});
    return CL_OK;
}

int cl_decode(uint32_t codec, float *target, const void *source, uint64_t count, uint64_t key, uint64_t block,
              int32_t add)
{
    const struct cl_codec *found = codec > 0 ? cl_codec_of((enum cl_codec_kind)(codec - 1)) : NULL;
    if (found == NULL)
        return CL_EINVAL;
    (add ? found->decode_add : found->decode)(target, source, count, (struct cl_codec_place){key, block});
    return CL_OK;
}
