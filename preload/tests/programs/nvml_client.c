// Calls NVML by one of the ways in which programs reach it. Reads commands from stdin, one per line. Answers each with
// one line: a figure, or the function's error code as a negative number.
//
//   nvml <route>   link (when built with -DLINKED), dlopen, next, default
//   cuda           calls cuCtxSynchronize of libcuda, which registers the process
//   init, flags <n>, shutdown, calls, users     nvmlInit_v2, nvmlInitWithFlags(n), nvmlShutdown; what the stub has seen
//   count, index <n>, uuid, name, short, mig, capability, clock <kind>
//   total, free, used, used2, rates, temperature, power, processes
//   future         a function that no list knows
//   start, join, inside, release                a thread in a call that blocks
//   reopen, open <path>                         closes the library and loads it again; loads another copy and uses that
//   wait <ms>      a wait for events: milliseconds that it took
//   begin, cancel  a thread in a wait for events without an end; cancels it there and waits for its end
//   storm, calm    threads that ask the name all the time; how many of their calls failed
//   fork <command>, forkwait <command>          the same in a forked child; which first calls the driver and reads a byte
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int (*Call)();
static const char *route;
static void *nvml, *cuda, *device;

#ifdef LINKED
#define NAMES(x) x(nvmlInit_v2) x(nvmlInitWithFlags) x(nvmlShutdown) x(nvmlErrorString) x(nvmlDeviceGetCount_v2) \
	x(nvmlDeviceGetHandleByIndex_v2) x(nvmlDeviceGetUUID) x(nvmlDeviceGetName) x(nvmlDeviceGetMigMode) \
	x(nvmlDeviceGetCudaComputeCapability) x(nvmlDeviceGetMaxClockInfo) x(nvmlDeviceGetMemoryInfo) \
	x(nvmlDeviceGetMemoryInfo_v2) x(nvmlDeviceGetUtilizationRates) x(nvmlDeviceGetTemperature) \
	x(nvmlDeviceGetPowerUsage) x(nvmlDeviceGetComputeRunningProcesses_v3) x(nvmlDeviceGetSamples) x(nvmlEventSetWait_v2)
#define DECLARE(name) int name();
NAMES(DECLARE)
#define NAMED(name) {#name, name},
static const struct { const char *name; Call call; } linked[] = {NAMES(NAMED)};
#endif

static Call look_up(const char *name)
{
#ifdef LINKED
	for (size_t n = 0; n < sizeof linked / sizeof *linked; n++)
		if (!strcmp(name, linked[n].name))
			return linked[n].call;
#endif
	void *from = !strcmp(route, "next") ? RTLD_NEXT : !strcmp(route, "default") ? RTLD_DEFAULT : nvml;
	Call found = (Call)dlsym(from, name);
	if (!found)
		exit(9);
	return found;
}

static volatile int storms;
static void *storm(void *unused)
{
	char text[96];
	long wrong = 0;
	while (storms)
		wrong += look_up("nvmlDeviceGetName")(device, text, 96u) || strcmp(text, "Stub GPU"), usleep(20);
	return (void *)wrong;
}

static void *blocks(void *unused) { return (void *)(long)look_up("nvmlDeviceGetSamples")(); }

static void *waits(void *unused) { return (void *)(long)look_up("nvmlEventSetWait_v2")(NULL, NULL, ~0u); }

// `value` is read after the call.
#define FIGURE(call, value) ({ int result = (call); result ? -result : (long)(value); })

static long make(const char *command)
{
	static pthread_t started, stormed[2];
	uint64_t memory[5] = {40 | 2 << 24};
	unsigned words[2] = {0, 0}, number = 0;
	char text[96], path[500];
	void *value;
	int registers = sscanf(command, "forkwait %95[^\n]", text) == 1;
	if (registers || sscanf(command, "fork %95[^\n]", text) == 1) {
		int status;
		pid_t child = fork();
		if (child == 0) {
			if (registers)
				make("cuda"), read(0, path, 1);
			_exit(make(text) & 0x7f);
		}
		waitpid(child, &status, 0);
		return WIFEXITED(status) ? WEXITSTATUS(status) : -status;
	}
	if (!strncmp(command, "cuda", 4))
		return ((Call)dlsym(cuda, "cuCtxSynchronize"))();
	if (!strncmp(command, "init", 4))
		return -look_up("nvmlInit_v2")();
	if (sscanf(command, "flags %u", &number) == 1)
		return -look_up("nvmlInitWithFlags")(number);
	if (!strncmp(command, "shutdown", 8))
		return -look_up("nvmlShutdown")();
	if (!strncmp(command, "calls", 5))
		return ((Call)dlsym(nvml, "stub_nvml_calls"))();
	if (!strncmp(command, "users", 5))
		return ((Call)dlsym(nvml, "stub_nvml_users"))();
	if (!strncmp(command, "count", 5))
		return FIGURE(look_up("nvmlDeviceGetCount_v2")(&number), number);
	if (sscanf(command, "index %u", &number) == 1)
		return FIGURE(look_up("nvmlDeviceGetHandleByIndex_v2")(number, &device), device == (void *)0x1000);
	if (!strncmp(command, "uuid", 4))
		return FIGURE(look_up("nvmlDeviceGetUUID")(device, text, 80u), strlen(text));
	if (!strncmp(command, "name", 4))
		return FIGURE(look_up("nvmlDeviceGetName")(device, text, 96u), !strcmp(text, "Stub GPU"));
	if (!strncmp(command, "short", 5))
		return -look_up("nvmlDeviceGetName")(device, text, 8u);
	if (!strncmp(command, "mig", 3))
		return -look_up("nvmlDeviceGetMigMode")(device, words, words + 1);
	if (!strncmp(command, "capability", 10))
		return FIGURE(look_up("nvmlDeviceGetCudaComputeCapability")(device, words, words + 1), words[0] * 10 + words[1]);
	if (sscanf(command, "clock %u", &number) == 1)
		return FIGURE(look_up("nvmlDeviceGetMaxClockInfo")(device, number, words), words[0]);
	if (!strncmp(command, "total", 5))
		return FIGURE(look_up("nvmlDeviceGetMemoryInfo")(device, memory), memory[0]);
	if (!strncmp(command, "free", 4))
		return FIGURE(look_up("nvmlDeviceGetMemoryInfo")(device, memory), memory[1]);
	if (!strncmp(command, "used2", 5))
		return FIGURE(look_up("nvmlDeviceGetMemoryInfo_v2")(device, memory), memory[4]);
	if (!strncmp(command, "used", 4))
		return FIGURE(look_up("nvmlDeviceGetMemoryInfo")(device, memory), memory[2]);
	if (!strncmp(command, "rates", 5))
		return FIGURE(look_up("nvmlDeviceGetUtilizationRates")(device, words), words[0] * 1000 + words[1]);
	if (!strncmp(command, "temperature", 11))
		return FIGURE(look_up("nvmlDeviceGetTemperature")(device, 0u, words), words[0]);
	if (!strncmp(command, "power", 5))
		return FIGURE(look_up("nvmlDeviceGetPowerUsage")(device, words), words[0]);
	if (!strncmp(command, "processes", 9))
		return FIGURE(look_up("nvmlDeviceGetComputeRunningProcesses_v3")(device, words, NULL), words[0]);
	if (!strncmp(command, "reopen", 6)) {
		dlclose(nvml);
		return (nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW)) ? 0 : -1;
	}
	if (sscanf(command, "open %499s", path) == 1)
		return (nvml = dlopen(path, RTLD_NOW)) ? 0 : -1;
	if (!strncmp(command, "future", 6))
		return -look_up("nvmlFutureCall")(1L, 2L, 3L, 4L, 5L, 6L, 7L);
	if (!strncmp(command, "start", 5))
		return pthread_create(&started, NULL, blocks, NULL);
	if (!strncmp(command, "begin", 5))
		return pthread_create(&started, NULL, waits, NULL);
	if (!strncmp(command, "cancel", 6)) {
		// The thread is cancelled where it sleeps, inside NVML.
		pthread_cancel(started);
		pthread_join(started, &value);
		return value == PTHREAD_CANCELED ? 0 : -1;
	}
	if (!strncmp(command, "storm", 5)) {
		storms = 1;
		return pthread_create(&stormed[0], NULL, storm, NULL) + pthread_create(&stormed[1], NULL, storm, NULL);
	}
	if (!strncmp(command, "calm", 4)) {
		void *first, *second;
		storms = 0;
		pthread_join(stormed[0], &first);
		pthread_join(stormed[1], &second);
		return (long)first + (long)second;
	}
	if (!strncmp(command, "join", 4)) {
		pthread_join(started, &value);
		return -(long)value;
	}
	if (!strncmp(command, "inside", 6))
		return ((void (*)(void))dlsym(nvml, "stub_nvml_wait_inside"))(), 0;
	if (!strncmp(command, "release", 7))
		return ((void (*)(void))dlsym(nvml, "stub_nvml_release"))(), 0;
	if (sscanf(command, "wait %u", &number) == 1) {
		struct timespec from, to;
		clock_gettime(CLOCK_MONOTONIC, &from);
		int result = look_up("nvmlEventSetWait_v2")(NULL, NULL, number);
		clock_gettime(CLOCK_MONOTONIC, &to);
		long took = (to.tv_sec - from.tv_sec) * 1000 + (to.tv_nsec - from.tv_nsec) / 1000000;
		return result == 10 ? took : -result;
	}
	return -1000;
}

int main(int argc, char **argv)
{
	static char line[512];
	route = argv[1];
	cuda = dlopen("libcuda.so.1", RTLD_NOW);
	int flag = strcmp(route, "dlopen") ? RTLD_GLOBAL : RTLD_LOCAL;
	nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | flag);
	if (!cuda || !nvml)
		return 8;
	while (fgets(line, sizeof line, stdin)) {
		printf("%ld\n", make(line));
		fflush(stdout);
	}
	return 0;
}
