// A libcuda.so.1 of a few functions, for tests of the preload library alone. Like the real driver, it ends a
// checkpointed process that calls it.
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
#define EXPORT __attribute__((visibility("default")))

static volatile int state; // CUprocessState
static long calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int inside, released;
static int ended; // from its own exit handler on

static void end(void) { ended = 1; }

static int owner;  // process of `state`
static int within; // calls that are between their first and their last look at the state

// A call and a move check each other, in the order that `membarrier`'s manual describes. Each writes its own word
// first. So if they overlap, at least one of the two sees the other.
static CUresult touch(void)
{
	if (ended)
		return 4;
	CUresult result = 0;
	__atomic_fetch_add(&within, 1, __ATOMIC_SEQ_CST);
	for (int look = 0; look < 20; look++) {
		if (!state)
			continue;
		if (owner == getpid())
			__builtin_trap();
		result = 3; // a forked child's driver has no state
	}
	__atomic_fetch_sub(&within, 1, __ATOMIC_SEQ_CST);
	__atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
	return result;
}

static int short_of_memory;

// Functions for the client. Their names are not hooked.
EXPORT void stub_short(int failures) { __atomic_store_n(&short_of_memory, failures, __ATOMIC_SEQ_CST); }
EXPORT long stub_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

EXPORT void stub_release(void)
{
	pthread_mutex_lock(&lock);
	released = 1;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

// Waits until the process runs, as a call of NVML does. If the process already runs at the call,
// waits for ever, as one of the driver's own threads does.
EXPORT CUresult stub_hidden(void)
{
	pthread_mutex_lock(&lock);
	int is_own = !state;
	inside++;
	pthread_cond_broadcast(&changed);
	while (state || is_own)
		pthread_cond_wait(&changed, &lock);
	inside--;
	pthread_mutex_unlock(&lock);
	return 0;
}

EXPORT void stub_wait_inside(int count)
{
	pthread_mutex_lock(&lock);
	while (inside < count)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
}

EXPORT CUresult cuInit(unsigned flags)
{
	static int begun;
	if (!begun)
		atexit(end);
	begun = 1;
	return touch();
}

static int raises;
// The next release of memory interrupts itself by SIGUSR1.
EXPORT void stub_raise(void) { raises = 1; }
EXPORT CUresult cuMemFree_v2(uint64_t at)
{
	int result = touch();
	if (raises) {
		raises = 0;
		raise(SIGUSR1);
	}
	return result;
}
EXPORT CUresult cuStreamDestroy_v2(void *stream) { return touch(); }
EXPORT CUresult cuCtxDestroy_v2(void *context) { return touch(); }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = 12080; return 0; }
EXPORT CUresult cuCtxSynchronize(void) { return touch(); }
EXPORT CUresult cuStreamSynchronize(void *stream) { return touch(); }
EXPORT CUresult cuStreamSynchronize_ptsz(void *stream) { return touch(); }
EXPORT CUresult cuStreamQuery(void *stream) { return touch(); }
EXPORT CUresult cuEventQuery(void *event) { return touch(); }
EXPORT CUresult cuEventSynchronize(void *event) { return touch(); }
EXPORT CUresult cuIpcGetEventHandle(void *handle, void *event) { return touch(); }
EXPORT CUresult cuIpcOpenEventHandle(void **event, long handle) { return touch(); }
EXPORT CUresult cuMemAlloc_v2(uint64_t *at, size_t bytes)
{
	*at = 1;
	if (__atomic_load_n(&short_of_memory, __ATOMIC_SEQ_CST) > 0) {
		__atomic_fetch_sub(&short_of_memory, 1, __ATOMIC_SEQ_CST);
		touch();
		return 2;
	}
	return touch();
}
EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 70000; *total = 80000; return touch(); }
EXPORT CUresult cuCtxGetDevice(int *device) { *device = 3; return 0; }
EXPORT CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0x40 + device, 16); return 0; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 3; return touch(); }
EXPORT CUresult cuDeviceGetName(char *name, int length, int device) { strncpy(name, "stub", length); return touch(); }
// The 32-bit version, and the version that `cuGetProcAddress` returns for the same name.
EXPORT CUresult cuDeviceTotalMem(uint32_t *bytes, int device) { *bytes = 0x4000; return touch(); }
EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 0x2300004000; return touch(); }
EXPORT CUresult cuMemAllocManaged(uint64_t *at, size_t bytes, unsigned flags) { *at = 1; return touch(); }
EXPORT CUresult cuCtxEnablePeerAccess(void *peer, unsigned flags) { return touch(); }
EXPORT CUresult cuFutureCall(void) { return touch(); }
EXPORT CUresult cuGetExportTable(const void **table, const void *id) { *table = NULL; return touch(); }

// Does next to nothing, for the benchmark.
EXPORT CUresult cuStreamGetFlags(void *stream, unsigned *flags) { return 0; }

// Blocks inside the driver until stub_release is called.
EXPORT CUresult cuStubBlock(void)
{
	touch();
	pthread_mutex_lock(&lock);
	inside++;
	pthread_cond_broadcast(&changed);
	while (!released)
		pthread_cond_wait(&changed, &lock);
	inside--;
	released = 0;
	pthread_mutex_unlock(&lock);
	return 0;
}

// Blocks, then calls back on the same thread.
EXPORT CUresult cuStubCallback(CUresult (*call)(void))
{
	cuStubBlock();
	return call();
}

// The same function under a name that the library hooks as work.
EXPORT CUresult cuStreamWaitEvent(CUresult (*call)(void)) { return cuStubCallback(call); }

EXPORT CUresult cuLaunchKernel(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k)
{
	long got[] = {a, b, c, d, e, f, g, h, i, j, k};
	for (int n = 0; n < 11; n++)
		if (got[n] != n + 1)
			return 1000 + n;
	return touch();
}

EXPORT CUresult cuStubDoubles(double a, double b, double c, double d, double e, double f, double g, double h, double i)
{
	double got[] = {a, b, c, d, e, f, g, h, i};
	for (int n = 0; n < 9; n++)
		if (got[n] != n + 0.5)
			return 1000 + n;
	return touch();
}

#ifndef NO_CHECKPOINT
EXPORT CUresult cuCheckpointProcessGetState(int pid, int *out)
{
	*out = state;
	return ended ? 4 : 0;
}

static CUresult move(int from, int to)
{
	// Use 512 KiB of stack. The driver's compiler needs even more.
	volatile char deep[512 << 10];
	for (size_t at = 0; at < sizeof deep; at += 4096)
		deep[at] = 1;
	if (ended)
		return 4;
	if (state != from)
		return 304;
	owner = getpid();
	pthread_mutex_lock(&lock); // a hidden call looks at the state with it
	__atomic_store_n(&state, to, __ATOMIC_SEQ_CST);
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	if (from == 0 && __atomic_load_n(&within, __ATOMIC_SEQ_CST))
		__builtin_trap();
	return 0;
}

// STUB_LOCK_FAILS=<code>, STUB_RESTORE_FAILS=<code>: every lock or restore fails with this code.
static const char *lock_fails, *restore_fails;
__attribute__((constructor)) static void begin(void)
{
	lock_fails = getenv("STUB_LOCK_FAILS");
	restore_fails = getenv("STUB_RESTORE_FAILS");
}
EXPORT CUresult cuCheckpointProcessLock(int pid, void *args) { return lock_fails ? atoi(lock_fails) : move(0, 1); }
EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, void *args) { return move(1, 2); }
EXPORT CUresult cuCheckpointProcessRestore(int pid, void *args)
{
	return restore_fails ? atoi(restore_fails) : move(2, 1);
}
EXPORT CUresult cuCheckpointProcessUnlock(int pid, void *args) { return move(1, 0); }
#endif

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

#define NAME(f) {#f, f}
static const struct { const char *name; void *function; } names[] = {
	NAME(cuInit), NAME(cuDriverGetVersion), NAME(cuCtxSynchronize), NAME(cuStreamQuery), NAME(cuEventQuery),
	NAME(cuMemAllocManaged), NAME(cuMemGetInfo_v2), NAME(cuCtxEnablePeerAccess), NAME(cuFutureCall), NAME(cuGetExportTable), NAME(cuDeviceGetCount),
	NAME(cuDeviceGetName), {"cuDeviceTotalMem", cuDeviceTotalMem_v2}, NAME(cuStubBlock),
	NAME(cuStubCallback), NAME(cuLaunchKernel), NAME(cuStubDoubles), {"cuMemAlloc", cuMemAlloc_v2},
};

static void *find(const char *name, int version, uint64_t flags)
{
	if (!strcmp(name, "cuGetProcAddress"))
		return version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
	if (!strcmp(name, "cuStreamSynchronize"))
		return flags & 2 ? (void *)cuStreamSynchronize_ptsz : (void *)cuStreamSynchronize;
	for (size_t n = 0; n < sizeof(names) / sizeof(*names); n++)
		if (!strcmp(name, names[n].name))
			return names[n].function;
	return NULL;
}

CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
	*out = find(name, version, flags);
	return *out ? 0 : 500;
}

CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
	*out = find(name, version, flags);
	if (status)
		*status = *out ? 0 : 1;
	return *out ? 0 : 500;
}
