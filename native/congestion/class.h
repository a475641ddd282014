/*
 * Class: the class of service of a message, 0 (the most urgent) to CL_CLASSES - 1.
 */
#pragma once

enum {
    CL_CLASSES = 8,
    CL_CLASSES_URGENT = 2, /* classes 0 and 1 cost some of the link's rate: beside them, queues are kept shorter */
};
