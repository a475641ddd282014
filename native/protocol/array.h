/*
 * Array: a list on the heap with a capacity, to which elements are added.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Makes room for one more element of `size` bytes after `count`; `list` is the address of the pointer to the elements.
 * False, and nothing changed, when there is no memory. */
static inline bool cl_array_reserve(void *list, uint32_t count, uint32_t *capacity, size_t size)
{
    void *old;
    if (count < *capacity)
        return true;
    uint32_t larger = *capacity ? 2 * *capacity : 8;
    memcpy(&old, list, sizeof old); /* a pointer to any type is not an lvalue of void * */
    void *grown = realloc(old, larger * size);
    if (grown == NULL)
        return false;
    memcpy(list, &grown, sizeof grown);
    *capacity = larger;
    return true;
}
