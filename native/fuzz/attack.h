/*
 * Attack: packets that no endpoint of the conversation sent: repeated, redirected, damaged, made up. An attacker's
 * packets must be rejected; an insider seals them with the key, and then only memory safety must hold.
 */
#pragma once

#include "fuzz/conversation.h"

void attack_repeat(struct conversation *c);
void attack_redirect(struct conversation *c);
void attack_damage(struct conversation *c, bool sealed);
void attack_make_up(struct conversation *c, bool sealed);
void attack_noise(struct conversation *c);
