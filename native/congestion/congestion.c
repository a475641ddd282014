#include "congestion/congestion.h"

#include <string.h>

static const struct cl_rate_control_type *const types[] = {&cl_rate_control_delay, &cl_rate_control_fixed};

const struct cl_rate_control_type *cl_congestion_find(const char *name)
{
    if (name == NULL)
        return types[0];
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i]->name, name) == 0)
            return types[i];
    return NULL;
}

void cl_congestion_nic_init(struct cl_congestion_nic *nic, const struct cl_rate_control_type *type,
                            uint32_t datagram_bytes)
{
    nic->control = (struct cl_rate_control_nic){.type = type};
    type->nic_init(&nic->control, datagram_bytes);
}

void cl_congestion_init(struct cl_congestion *congestion, struct cl_congestion_nic *nic, uint32_t datagram_bytes)
{
    congestion->control = (struct cl_rate_control){.type = nic->control.type, .nic = &nic->control};
    congestion->control.type->init(&congestion->control, datagram_bytes);
}

struct cl_congestion_report cl_congestion_report(const struct cl_congestion *congestion)
{
    const struct cl_rate_control_nic *nic = congestion->control.nic;
    struct cl_congestion_report report = {.delivered_bytes = cl_peak_rate(&nic->delivered),
                                          .arrived_bytes = cl_peak_rate(&nic->arrived)};
    congestion->control.type->report(&congestion->control, &report);
    return report;
}
