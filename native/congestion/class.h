/*
 * Class: the class of service of a message, 0 (the most urgent) to CL_CLASSES - 1. Between hosts there is one more,
 * after them: messages of CL_CLASS_YIELDS leave only what nobody else wants (scavenger.h). Within a host they are of
 * the last class.
 */
#pragma once

#include <stdint.h>

enum {
    CL_CLASSES = 8,
    CL_CLASSES_URGENT = 2, /* classes 0 and 1 cost some of the link's rate: beside them, queues are kept shorter */
    CL_CLASSES_PROMPT = 6, /* of classes 6 and 7, nobody waits for the results soon: they get no copies (repeat.h) */
    CL_CLASS_YIELDS = CL_CLASSES,
    CL_CLASSES_BETWEEN_HOSTS,
};

/* The class of a message or an operation within a host, and in the heads of packets. */
static inline uint8_t cl_class_within_host(uint8_t class)
{
    return class < CL_CLASSES ? class : CL_CLASSES - 1;
}
