// A library in front of libc. Whenever a thread is created, it calls the driver on the thread that creates the new one.
// Every line on stdin makes an allocation, and is answered with its result.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/prctl.h>

static int (*allocate)(uint64_t *, size_t);
static int created;

// This definition replaces libc's for all libraries of the process.
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*begin)(void *), void *argument)
{
	int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
	uint64_t at;
	*(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
	if (!created++)
		allocate(&at, 4096);
	return real(thread, attributes, begin, argument);
}

int main(void)
{
	char line[16];
	uint64_t at;
	prctl(PR_SET_PDEATHSIG, SIGKILL); // a call that never returns has all signals blocked
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	*(void **)&allocate = driver ? dlsym(driver, "cuMemAlloc_v2") : NULL;
	if (!allocate)
		return 8;
	while (fgets(line, sizeof line, stdin)) {
		printf("%d\n", allocate(&at, 4096));
		fflush(stdout);
	}
	return created ? 0 : 7;
}
