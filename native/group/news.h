/*
 * News: what callers are told once the packets of a turn have left. A caller may end its process as soon as it knows
 * that its operation has ended; the other ranks must have the acknowledgements of the last packets by then, or they
 * would take the process for one that died amid the operation.
 */
#pragma once

#include <stddef.h>

struct cl_news_item {
    struct cl_news_item *next;
    void (*tell)(struct cl_news_item *item); /* the item may be gone afterwards */
};

/* All zero: none. */
struct cl_news {
    struct cl_news_item *first, *last;
};

static inline void cl_news_add(struct cl_news *news, struct cl_news_item *item)
{
    item->next = NULL;
    *(news->last != NULL ? &news->last->next : &news->first) = item;
    news->last = item;
}

static inline void cl_news_tell(struct cl_news *news)
{
    struct cl_news_item *item = news->first;
    *news = (struct cl_news){0};
    while (item != NULL) {
        struct cl_news_item *next = item->next;
        item->tell(item);
        item = next;
    }
}
