/* The only file of the data plane that reads the clock. */
#include "plane.h"
#include <time.h>

/* CLOCK_MONOTONIC in nanoseconds, the time base of all records and deadlines. */
uint64_t clock_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}
