#include "fuzz/command.h"

#include <string.h>

#include "fuzz/attack.h"
#include "fuzz/message.h"

enum { QUIET_US = 30000000 };

static void end_something(struct conversation *c)
{
    uint32_t shape = conversation_take(c), self = shape % ENDPOINTS, group = 1 + shape / 4 % GROUPS,
             which = conversation_take(c);
    struct cl_endpoint *endpoint = conversation_endpoint(c, self);
    static const uint16_t EVERYBODY[] = {0, 1, 2, 77};
    c->ended = true;
    switch (shape / 16 % 8) {
    case 0:
        cl_endpoint_peer_lost(endpoint, (uint16_t)((self + 1) % ENDPOINTS));
        break;
    case 1:
        cl_endpoint_abort(endpoint, group, EVERYBODY, which % 5, CL_ETIMEDOUT, UINT16_MAX);
        break;
    case 2:
        message_cancel(c, self, group, UINT32_MAX);
        break;
    default:
        message_cancel(c, self, group, which % (c->sequence + 1));
        break;
    }
    conversation_turn(c, self);
}

static void pass_time(struct conversation *c)
{
    uint32_t how = conversation_take(c);
    c->clock.now_ns += ((uint64_t)(1 + how % 16) << how / 16) * 1000;
    conversation_turn_all(c);
}

static void obey(struct conversation *c)
{
    uint32_t command = conversation_take(c);
    switch (command % 16) {
    case 0:
        message_post(c);
        break;
    case 1:
        pass_time(c);
        break;
    case 2:
        conversation_deliver(c, conversation_take(c), false);
        break;
    case 3:
        if (c->flying_count)
            conversation_take_flying(c, conversation_take(c));
        break;
    case 4:
        attack_repeat(c);
        break;
    case 5:
        attack_redirect(c);
        break;
    case 6:
        attack_damage(c, false);
        break;
    case 7:
        attack_damage(c, true);
        break;
    case 8:
        attack_make_up(c, command & 16);
        break;
    case 9:
        if (command / 16 == 0)
            attack_noise(c);
        else if (command / 16 == 1)
            end_something(c);
        else
            message_post_rest(c, 1);
        break;
    default: /* the rule: packets arrive in order */
        for (uint32_t i = command / 16; i > 0; i--)
            conversation_deliver(c, 0, command % 16 > 11 || i == 1);
        break;
    }
}

/* Without further interference every posted message completes. */
static void wind_up(struct conversation *c)
{
    message_post_rest(c, UINT32_MAX);
    uint64_t until_us = conversation_now_us(c) + QUIET_US;
    while (message_any_open(c) && !c->ended) {
        HOLDS(conversation_now_us(c) < until_us);
        conversation_turn_all(c);
        if (c->flying_count) {
            c->clock.now_ns += 10000;
            conversation_deliver(c, 0, true);
        } else {
            HOLDS(sim_clock_step(&c->clock));
        }
    }
}

void command_run(const uint8_t *input, size_t length)
{
    static struct conversation c;
    memset(&c, 0, sizeof(c));
    c.input = input;
    c.length = length;
    c.complete = message_complete;
    conversation_begin(&c);
    while (c.at < c.length)
        obey(&c);
    if (!c.insider && !c.ended)
        wind_up(&c);
    conversation_end(&c);
}
