#include "kernels/codec.h"

#include "kernels/level.h"

const struct cl_codec *cl_codec_of(enum cl_codec_kind kind)
{
    return (unsigned)kind < CL_CODECS ? &cl_level_current()->codecs[kind] : NULL;
}
