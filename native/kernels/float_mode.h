/*
 * Float mode: how a thread's floating-point arithmetic treats subnormal numbers, rounds, and traps. A program may
 * change it (torch.set_flush_denormal, fesetround), on some of its threads, on some ranks. Kernels run on any thread,
 * and the same reduction runs on several ranks, so every kernel with floating-point arithmetic begins with
 * CL_IEEE_ARITHMETIC: to the end of the function, subnormals are kept, results are rounded to the nearest even value,
 * and nothing traps. Then the thread has its own mode again.
 */
#pragma once

#include <stdint.h>

#if defined(__x86_64__)

#include <xmmintrin.h>

typedef uint32_t cl_float_mode;

/* Inline assembly, because compilers move memory accesses across _mm_setcsr. */
static inline cl_float_mode cl_float_mode_read(void)
{
    cl_float_mode mode;
    __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode;
}

static inline void cl_float_mode_write(cl_float_mode mode)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory");
}

enum {
    CL_FLOAT_MODE_IEEE = _MM_MASK_MASK,        /* the exceptions masked, and all else 0 */
    CL_FLOAT_MODE_STICKY = _MM_EXCEPT_MASK,    /* flags of exceptions that have happened: no part of the mode */
    CL_FLOAT_MODE_FLUSHES = _MM_FLUSH_ZERO_ON, /* bits that a test sets: results, and operands */
    CL_FLOAT_MODE_FLUSHES_OPERANDS = 0x40,
};

#elif defined(__aarch64__)

typedef uint64_t cl_float_mode;

static inline cl_float_mode cl_float_mode_read(void)
{
    cl_float_mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
}

static inline void cl_float_mode_write(cl_float_mode mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}

enum {
    CL_FLOAT_MODE_IEEE = 0,
    CL_FLOAT_MODE_STICKY = 0, /* these are in FPSR */
    CL_FLOAT_MODE_FLUSHES = 1 << 24,
    CL_FLOAT_MODE_FLUSHES_OPERANDS = 1 << 24,
};

#else

/* Another processor: its mode stays as it is. */
typedef uint32_t cl_float_mode;

static inline cl_float_mode cl_float_mode_read(void)
{
    return 0;
}

static inline void cl_float_mode_write(cl_float_mode mode)
{
    (void)mode;
}

enum {
    CL_FLOAT_MODE_IEEE = 0,
    CL_FLOAT_MODE_STICKY = 0,
    CL_FLOAT_MODE_FLUSHES = 0,
    CL_FLOAT_MODE_FLUSHES_OPERANDS = 0,
};

#endif

static inline int cl_float_mode_differs(cl_float_mode mode)
{
    return (mode & ~(cl_float_mode)CL_FLOAT_MODE_STICKY) != CL_FLOAT_MODE_IEEE;
}

/* Returns the thread's mode, for cl_float_mode_leave. Most threads are in the right mode, and then only read it. */
static inline cl_float_mode cl_float_mode_enter(void)
{
    cl_float_mode mode = cl_float_mode_read();
    if (cl_float_mode_differs(mode))
        cl_float_mode_write(CL_FLOAT_MODE_IEEE);
    return mode;
}

static inline void cl_float_mode_leave(const cl_float_mode *mode)
{
    if (cl_float_mode_differs(*mode))
        cl_float_mode_write(*mode);
}

#define CL_IEEE_ARITHMETIC                                                                                             \
    __attribute__((cleanup(cl_float_mode_leave), unused)) const cl_float_mode own_mode = cl_float_mode_enter()
