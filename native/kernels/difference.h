/*
 * Differences: an array of values as its difference to an earlier one, bit by bit, near its entropy. Made for weights
 * between two steps of an optimizer, where few values change, and most of these by one unit in the last place.
 *
 * A value of 1, 2, 4 or 8 bytes is a whole number here, whatever it means: its change is the difference modulo 2^bits,
 * as a sign and a magnitude. So NaNs keep their payloads, and a difference can be taken back. The code of an array is
 * that of its blocks of CL_DIFFERENCE_VALUES values, one after another. A block:
 *
 *   2 bytes   number of changes; 0: nothing follows; 0xFFFF: plain, see below
 *   1 byte    gap order (lower 4 bits), run order (upper 4)
 *   2 bytes   number of large changes: those of a magnitude above 1
 *   1 byte    magnitude order; only if there are large changes
 *   bits      of each change: the unchanged values before it (Rice code of the gap order), its sign (1 bit)
 *   bits      of each large change: the changes before it that are not large (Rice code of the run order), its
 * magnitude less 2 (Exp-Golomb code of the magnitude order)
 *
 * The lowest bit of a byte comes first, and the bits of a block end with a whole byte. The Rice code of order k of n is
 * n >> k zeros, a one, and the k lower bits of n (Rice, "Some practical universal noiseless coding techniques", 1979);
 * it is optimal for the geometric gaps of independent changes if k is near log2(ln 2 * mean). The Exp-Golomb code of
 * order k of n is, for m = (n >> k) + 1 of b bits, b - 1 zeros, a one, the b - 1 lower bits of m, and the k lower bits
 * of n (Teuhola, 1978). A plain block has the changes of all its values as they are, which no code makes longer.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
    CL_DIFFERENCE_VALUES = 1 << 15,
    CL_DIFFERENCE_PLAIN = 0xFFFF,
    CL_DIFFERENCE_SLACK = 64, /* bytes of room beyond its end that a code needs while it is made */
};
