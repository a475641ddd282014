#include "kernels/reduce.h"

#include "kernels/level.h"

cl_reduce_fn cl_reduce_kernel(enum cl_dtype dtype, enum cl_op op)
{
    return (size_t)dtype < CL_DTYPES && (size_t)op < CL_OPS ? cl_level_current()->reduce[dtype][op] : NULL;
}

cl_scale_fn cl_scale_kernel(enum cl_dtype dtype)
{
    return (size_t)dtype < CL_DTYPES ? cl_level_current()->scale[dtype] : NULL;
}

size_t cl_dtype_size(enum cl_dtype dtype)
{
    static const size_t sizes[CL_DTYPES] = {
        [CL_U8] = 1,   [CL_I8] = 1,  [CL_I16] = 2, [CL_I32] = 4, [CL_I64] = 8, [CL_F16] = 2,
        [CL_BF16] = 2, [CL_F32] = 4, [CL_F64] = 8, [CL_U16] = 2, [CL_U32] = 4, [CL_U64] = 8,
    };
    return (size_t)dtype < CL_DTYPES ? sizes[dtype] : 0;
}
