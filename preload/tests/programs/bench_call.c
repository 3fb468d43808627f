// Times calls of a driver function: direct, or hooked when the preload library is
// loaded. Prints one JSON object. The driver is the stub driver, whose cuStreamGetFlags returns
// at once. The library knows this function, as it knows nearly all functions that programs call.
// A function that it does not know takes the slow path.
//
//   bench_call <threads> <million calls per round> <rounds>
//
// Method: in each round, each thread makes its calls in one loop between two readings of its own processor time. So
// more threads than processors cost nothing by themselves. The figure of a round is the mean of its threads. The result
// is the median over the rounds, in nanoseconds per call.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int (*Call)(void *, unsigned *);
static Call call;
static long calls_per_round;
static int rounds;
static pthread_barrier_t barrier;
static double *figures; // [round][thread]
static int threads;

static double now_ns(void)
{
	struct timespec time;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

static void *measure(void *index)
{
	for (int round = 0; round < rounds; round++) {
		pthread_barrier_wait(&barrier);
		double start = now_ns();
		for (long n = 0; n < calls_per_round; n++)
			call(NULL, NULL);
		figures[round * threads + (long)index] = (now_ns() - start) / calls_per_round;
	}
	return NULL;
}

static int compare(const void *a, const void *b)
{
	double difference = *(const double *)a - *(const double *)b;
	return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	threads = atoi(argv[1]);
	calls_per_round = atof(argv[2]) * 1e6;
	rounds = atoi(argv[3]);
	void *handle = dlopen("libcuda.so.1", RTLD_NOW);
	if (!handle || !(call = (Call)dlsym(handle, "cuStreamGetFlags")))
		return 1;
	call(NULL, NULL);
	figures = calloc((size_t)rounds * threads, sizeof *figures);
	double *means = calloc(rounds, sizeof *means);
	pthread_t workers[threads];
	pthread_barrier_init(&barrier, NULL, threads);
	for (long n = 0; n < threads; n++)
		pthread_create(&workers[n], NULL, measure, (void *)n);
	for (int n = 0; n < threads; n++)
		pthread_join(workers[n], NULL);
	for (int round = 0; round < rounds; round++) {
		for (int n = 0; n < threads; n++)
			means[round] += figures[round * threads + n] / threads;
	}
	qsort(means, rounds, sizeof *means, compare);
	printf("{\"threads\": %d, \"calls_per_round\": %ld, \"rounds\": %d, \"ns_per_call_median\": %.3f, "
	       "\"ns_per_call_min\": %.3f, \"ns_per_call_max\": %.3f}\n",
	       threads, calls_per_round, rounds, means[rounds / 2], means[0], means[rounds - 1]);
	return 0;
}
