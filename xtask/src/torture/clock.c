/* The wall clock, moved by the seconds in the file FAKE_CLOCK. Other clocks only go forward, and stay. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    long done = syscall(SYS_clock_gettime, clock, now);
    const char *file = getenv("FAKE_CLOCK");
    if (done == 0 && clock == CLOCK_REALTIME && file != NULL) {
        long long offset = 0;
        int fd = open(file, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            if (read(fd, &offset, sizeof offset) == sizeof offset)
                now->tv_sec += offset;
            close(fd);
        }
    }
    return (int)done;
}
