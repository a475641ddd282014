#include "sim/noise.h"

#include "protocol/packet.h"

bool sim_noise_loses(struct sim_noise *noise, struct sim_random *random, uint64_t now_ns)
{
    if (now_ns >= noise->burst_until_ns && sim_random_chance(random, noise->burst_begin))
        noise->burst_until_ns = now_ns + sim_random_below(random, noise->burst_ns);
    double loss = noise->loss;
    if (now_ns < noise->burst_until_ns && noise->burst_loss > loss)
        loss = noise->burst_loss;
    return sim_random_chance(random, noise->storm_loss > loss ? noise->storm_loss : loss);
}

/* UDP's checksum catches nearly all flipped bits in the kernel: for the endpoint such a packet is lost. The tag must
 * catch the other ones in the header, and those in the payload where it covers the payload. */
void sim_noise_flip(const struct sim_noise *noise, struct sim_random *random, uint8_t *bytes, uint32_t length)
{
    if (length < CL_PACKET_HEAD_BYTES)
        return;
    uint32_t at = (uint32_t)sim_random_below(random, noise->corrupt_payload ? length : CL_PACKET_HEAD_BYTES);
    bytes[at] = (uint8_t)(bytes[at] ^ 1u << sim_random_below(random, 8));
}
