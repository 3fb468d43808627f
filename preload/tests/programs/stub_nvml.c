// A libnvidia-ml.so.1 of a few functions. In the real NVML, a call blocks while the context of its process is
// checkpointed. In this stub such a call ends the process, so that a test notices it sooner.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define DEVICE ((void *)0x1000)

static int users, calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int inside, released;

static int is_away(void)
{
	static int (*get)(int, int *);
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	int state = 0;
	if (cuda && !get)
		*(void **)&get = dlsym(cuda, "cuCheckpointProcessGetState");
	if (cuda && get)
		get(getpid(), &state);
	return state;
}

static int touch(void)
{
	if (is_away())
		__builtin_trap();
	__atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
	return users ? 0 : 1;
}

// Functions for the client. Their names are not hooked.
EXPORT int stub_nvml_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }
EXPORT int stub_nvml_users(void) { return users; }
EXPORT void stub_nvml_release(void)
{
	pthread_mutex_lock(&lock);
	released = 1;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}
EXPORT void stub_nvml_wait_inside(void)
{
	pthread_mutex_lock(&lock);
	while (!inside)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
}

EXPORT int nvmlInit_v2(void)
{
	touch();
	users++;
	return 0;
}
EXPORT int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
EXPORT int nvmlShutdown(void)
{
	int result = touch();
	users -= result == 0;
	return result;
}
EXPORT const char *nvmlErrorString(int result) { return result ? "an error" : "success"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return touch(); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
	*device = DEVICE;
	return index ? 2 : touch();
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
	*device = DEVICE;
	return strncmp(uuid, "GPU-", 4) ? 6 : touch();
}
static int text(char *to, unsigned room, const char *from)
{
	if (strlen(from) >= room)
		return 7;
	strcpy(to, from);
	return touch();
}
EXPORT int nvmlDeviceGetUUID(void *device, char *to, unsigned room)
{
	return text(to, room, "GPU-07070707-0707-0707-0707-070707070707");
}
EXPORT int nvmlDeviceGetName(void *device, char *to, unsigned room)
{
	touch();
	usleep(50);
	return text(to, room, "Stub GPU");
}
EXPORT int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) { return touch() ? 1 : 3; }
EXPORT int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
	*major = 9;
	*minor = 5;
	return touch();
}
EXPORT int nvmlDeviceGetMaxClockInfo(void *device, unsigned kind, unsigned *mhz)
{
	*mhz = 100 + kind;
	return touch();
}
EXPORT int nvmlDeviceGetMemoryInfo(void *device, uint64_t *memory)
{
	memory[0] = 1000;
	memory[1] = 400;
	memory[2] = 600;
	return touch();
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, uint64_t *memory)
{
	memory[1] = 1000;
	memory[2] = 50;
	memory[3] = 400;
	memory[4] = 550;
	return touch();
}
EXPORT int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates)
{
	rates[0] = 70;
	rates[1] = 20;
	return touch();
}
EXPORT int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *degrees)
{
	*degrees = 66;
	return touch();
}
EXPORT int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
	*milliwatts = 300000;
	return touch();
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes)
{
	*count = 1;
	return touch();
}
// A function that is in no list, with an argument on the stack.
EXPORT int nvmlFutureCall(long a, long b, long c, long d, long e, long f, long g)
{
	int result = touch();
	return a == 1 && b == 2 && c == 3 && d == 4 && e == 5 && f == 6 && g == 7 ? result : 99;
}
// Blocks inside NVML until the client releases it.
EXPORT int nvmlDeviceGetSamples(void)
{
	touch();
	pthread_mutex_lock(&lock);
	inside = 1;
	pthread_cond_broadcast(&changed);
	while (!released)
		pthread_cond_wait(&changed, &lock);
	inside = released = 0;
	pthread_mutex_unlock(&lock);
	return touch();
}
EXPORT int nvmlEventSetWait_v2(void *set, void *data, unsigned timeout_ms)
{
	touch();
	usleep(timeout_ms * 1000);
	touch();
	return 10;
}
