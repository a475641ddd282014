/* The entry of libFuzzer, which finds inputs that reach new code: `make fuzz-coverage`. */
#include "fuzz/command.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    command_run(data, size);
    return 0;
}
