#include "protocol/index.h"

#include <stdlib.h>

enum { BUCKETS_LEAST = 64 };

static void enter(struct cl_index *index, struct cl_index_place *place)
{
    struct cl_index_place **bucket = &index->buckets[place->key & (index->bucket_count - 1)];
    place->next = *bucket;
    place->link = bucket;
    if (place->next != NULL)
        place->next->link = &place->next;
    *bucket = place;
}

static bool grow(struct cl_index *index)
{
    struct cl_index grown = {.bucket_count = index->bucket_count ? 2 * index->bucket_count : BUCKETS_LEAST,
                             .count = index->count};
    grown.buckets = calloc(grown.bucket_count, sizeof(struct cl_index_place *));
    if (grown.buckets == NULL)
        return false;
    for (uint32_t i = 0; i < index->bucket_count; i++) {
        struct cl_index_place *places = NULL, *next;
        for (struct cl_index_place *place = index->buckets[i]; place != NULL;
             place = next) { /* turned round: the oldest first */
            next = place->next;
            place->next = places;
            places = place;
        }
        for (struct cl_index_place *place = places; place != NULL; place = next) {
            next = place->next;
            enter(&grown, place);
        }
    }
    free(index->buckets);
    *index = grown;
    return true;
}

bool cl_index_add(struct cl_index *index, struct cl_index_place *place, uint64_t key)
{
    if (index->count >= index->bucket_count && !grow(index))
        return false;
    place->key = key;
    enter(index, place);
    index->count++;
    return true;
}

void cl_index_remove(struct cl_index *index, struct cl_index_place *place)
{
    if (place->link == NULL)
        return;
    *place->link = place->next;
    if (place->next != NULL)
        place->next->link = place->link;
    *place = (struct cl_index_place){0};
    index->count--;
}

struct cl_index_place *cl_index_find(const struct cl_index *index, uint64_t key)
{
    struct cl_index_place *place = index->bucket_count ? index->buckets[key & (index->bucket_count - 1)] : NULL;
    while (place != NULL && place->key != key)
        place = place->next;
    return place;
}

struct cl_index_place *cl_index_next(const struct cl_index_place *place)
{
    struct cl_index_place *next = place->next;
    while (next != NULL && next->key != place->key)
        next = next->next;
    return next;
}

void cl_index_free(struct cl_index *index)
{
    free(index->buckets);
    *index = (struct cl_index){0};
}
