/* Moves the clock of the day by the seconds in the file that CLOCK_FILE names, as when an administrator sets it: it jumps,
   and waits until a time of the day with it. The monotonic clock stays. For LD_PRELOAD; faults.py builds it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long moved(void) {
  const char *name = getenv("CLOCK_FILE");
  FILE *file = name ? fopen(name, "r") : NULL;
  long seconds = 0;
  if (file) {
    if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
    fclose(file);
  }
  return seconds;
}

static int of_day(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = syscall(SYS_clock_gettime, clock, now);
  if (!status && of_day(clock)) now->tv_sec += moved();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int status = syscall(SYS_gettimeofday, now, zone);
  if (!status) now->tv_sec += moved();
  return status;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

/* The kernel's clock did not jump: what waits for a time of ours waits for that time less the jump. A time of the
   monotonic clock, which some conditions wait for, is that since the machine's start. */
static struct timespec of_kernel(const struct timespec *until) {
  struct timespec found = *until;
  if (found.tv_sec > 1000000000) found.tv_sec -= moved();
  return found;
}

int sem_timedwait(sem_t *restrict it, const struct timespec *restrict until) {
  int (*real)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec kernels = of_kernel(until);
  return real(it, &kernels);
}

int pthread_cond_timedwait(pthread_cond_t *restrict it, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) =
      dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec kernels = of_kernel(until);
  return real(it, mutex, &kernels);
}
