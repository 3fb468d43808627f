// Calls the driver by one of the ways in which programs reach it. Reads commands from stdin, one per line, and answers
// each with one line.
//
//   client <route>       link (when built with -DLINKED), dlopen, proc1, proc2, next, default,
//                        forward (a library with functions of the driver's names)
//                        CLIENT_STACK=<bytes>: the stack of threads whose creator does not choose
//                        CLIENT_DENY=<number>[:<first argument>]: that system call fails with ENOSYS
//                        CLIENT_KILL=<number>: that system call ends the process
//                        CLIENT_IGNORE=<number>: that signal is ignored
//   <function>           calls it, answers its result
//   fork <function>      calls it in a forked child, answers the child's result
//   forkwait <function>  the same, and the child lives on until it has read a line
//   threads <n> <function>   calls it on n living threads, then answers the sum of results
//   small <function>     calls it on a thread with the smallest stack
//   start <function>     calls it on a thread; `join` answers its result
//   warm <function>      the same after another call, so that this one takes the fast path
//   signal <function>    calls it in a signal handler, answers the result
//   interrupt <function> the next release of memory is interrupted inside the driver by a handler that calls it
//   jump <function>      calls it, and leaves it by siglongjmp out of the handler of SIGUSR1: answers 99
//   hidden               calls a function of the driver that no hook sees on a thread; `join` answers its result
//   inside <n> / release waits until n calls block in the driver / lets one go
//   short <n>            the next n allocations find no memory
//   table <id>           asks for the private table with this id, 32 hexadecimal digits
//   devices              how many devices there are, times 100, and the length of the first one's name
//   total <function>     calls it with a variable whose bytes are all 0x5a, answers the variable
//   memory free|total    what cuMemGetInfo says
//   callback             starts a call that blocks, then calls back cuCtxSynchronize
//   same <f>             whether two look-ups give the same address
//   unload               closes libcuda, answers whether it is still loaded
//   closefds             closes all descriptors from 3 on
//   fillfds              opens descriptors up to the limit, and again whenever one becomes free
//   environ              makes the list of the environment unreadable, as a list that was freed may be
//   wait                 answers as waitpid for any child does, errors negative
//   count                answers how many calls the driver has seen
//   at exit <function>...    calls them in an exit handler, which answers their results; `count` as above
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __GLIBC__ // the kernel's headers are not at hand for musl
#include <linux/filter.h>
#include <linux/seccomp.h>
#endif

typedef int (*Call)();
static const char *route;
static void *handle;

#ifdef LINKED
int cuInit(), cuCtxSynchronize(), cuStreamSynchronize(), cuStreamQuery(), cuEventQuery(), cuMemAlloc_v2(),
	cuMemAllocManaged(), cuLaunchKernel(), cuGetExportTable(), cuDeviceGetCount(),
	cuDeviceGetName();
static const struct { const char *name; Call call; } linked[] = {
	{"cuInit", cuInit}, {"cuCtxSynchronize", cuCtxSynchronize}, {"cuStreamSynchronize", cuStreamSynchronize},
	{"cuStreamQuery", cuStreamQuery}, {"cuEventQuery", cuEventQuery}, {"cuMemAlloc", cuMemAlloc_v2},
	{"cuMemAllocManaged", cuMemAllocManaged}, {"cuLaunchKernel", cuLaunchKernel},
	{"cuGetExportTable", cuGetExportTable}, {"cuDeviceGetCount", cuDeviceGetCount},
	{"cuDeviceGetName", cuDeviceGetName},
};
#endif

static void *look_up(const char *name)
{
	char exported[64];
	void *found = NULL;
#ifdef LINKED
	for (size_t n = 0; n < sizeof(linked) / sizeof(*linked); n++)
		if (!strcmp(name, linked[n].name))
			return linked[n].call;
#endif
	if (!strncmp(route, "proc", 4)) {
		int version = route[4] == '1' ? 11030 : 12000;
		int status;
		Call get = dlsym(handle, version < 12000 ? "cuGetProcAddress" : "cuGetProcAddress_v2");
		// Do as libcudart does: first request cuGetProcAddress from itself, with the version in use.
		if (get("cuGetProcAddress", &get, version, (uint64_t)0, &status))
			return NULL;
		return get(name, &found, version, (uint64_t)0, &status) ? NULL : found;
	}
	snprintf(exported, sizeof exported, "%s%s", name, strcmp(name, "cuMemAlloc") ? "" : "_v2");
	if (!strcmp(route, "forward"))
		return ((void *(*)(const char *))dlsym(handle, "forward_address"))(name);
	if (!strcmp(route, "next"))
		return dlsym(RTLD_NEXT, exported);
	if (!strcmp(route, "default"))
		return dlsym(RTLD_DEFAULT, exported);
	return dlsym(handle, exported);
}

static int make(const char *name)
{
	uint64_t at;
	Call call = look_up(name);
	if (!call)
		return -1;
	errno = 77;
	int result;
	if (!strcmp(name, "cuLaunchKernel"))
		result = call(1L, 2L, 3L, 4L, 5L, 6L, 7L, 8L, 9L, 10L, 11L);
	else if (!strcmp(name, "cuStubDoubles"))
		result = ((int (*)(double, double, double, double, double, double, double, double, double))call)(
			0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5);
	else if (!strncmp(name, "cuMemAlloc", 10))
		result = call(&at, (size_t)4096, 1u);
	else if (!strcmp(name, "cuStubCallback") || !strcmp(name, "cuStreamWaitEvent"))
		result = call(look_up("cuCtxSynchronize"));
	else if (!strncmp(name, "cuMemFree", 9) || strstr(name, "Destroy"))
		result = call(7L);
	else
		result = call(0L, 0L);
	return errno == 77 ? result : -2;
}

static int ask_for_table(const char *digits)
{
	unsigned char id[16];
	const void *table;
	Call call = look_up("cuGetExportTable");
	for (int n = 0; n < 16; n++)
		if (sscanf(digits + 2 * n, "%2hhx", &id[n]) != 1)
			return -3;
	return call ? call(&table, id) : -1;
}

static int memory_info(int wants_total)
{
	size_t free = 0, total = 0;
	Call call = look_up("cuMemGetInfo_v2");
	int result = call ? call(&free, &total) : -1;
	return result ? -result : (int)(wants_total ? total : free);
}

static int devices(void)
{
	char name[64] = "";
	int count = 0;
	Call get_count = look_up("cuDeviceGetCount"), get_name = look_up("cuDeviceGetName");
	if (get_count(&count) || get_name(name, (int)sizeof name, 0))
		return -1;
	return 100 * count + (int)strlen(name);
}

static long total(const char *name)
{
	uint64_t bytes = 0x5a5a5a5a5a5a5a5a;
	Call call = look_up(name);
	return call(&bytes, 0) ? -1 : (long)bytes;
}

static pthread_barrier_t barrier;

static void *with_others(void *name)
{
	long result = make(name);
	pthread_barrier_wait(&barrier);
	return (void *)result;
}

static void *after_another(void *name)
{
	long first = make("cuCtxSynchronize");
	return (void *)(first ? first : (long)make(name));
}

static void *alone(void *name) { return (void *)(long)make(name); }

static void *hidden(void *unused) { return (void *)(long)((Call)dlsym(handle, "stub_hidden"))(); }

static char handled[64];
static volatile int handled_result;
static sigjmp_buf before_call;
static void jump_out(int signal) { siglongjmp(before_call, 1); }
static void handler(int signal) { handled_result = make(handled); }

static long on_threads(int count, const char *name, int small)
{
	pthread_t threads[count];
	pthread_attr_t attributes;
	long sum = 0;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, small ? PTHREAD_STACK_MIN : 128 * 1024);
	pthread_barrier_init(&barrier, NULL, count);
	for (int n = 0; n < count; n++)
		if (pthread_create(&threads[n], &attributes, with_others, (void *)name))
			exit(9);
	for (int n = 0; n < count; n++) {
		void *result;
		pthread_join(threads[n], &result);
		sum += (long)result;
	}
	return sum;
}

// As in libc, the handler that was registered last runs first.
static char at_exit[4][128];
static int handlers;

static void exit_handler(void)
{
	for (char *name = strtok(at_exit[--handlers], " \n"); name; name = strtok(NULL, " \n")) {
		long (*calls)(void);
		*(void **)&calls = dlsym(handle, "stub_calls");
		printf("%ld\n", strcmp(name, "count") ? (long)make(name) : calls());
	}
	fflush(stdout);
}

static void deny(unsigned number, int command, int kills)
{
#ifdef __GLIBC__
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
		// If every command is meant, load and compare the number of the system call again.
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, command < 0 ? 0 : offsetof(struct seccomp_data, args)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, command < 0 ? number : command, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, kills ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | ENOSYS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		exit(7);
#endif
}

static void *fill(void *unused)
{
	for (;;) {
		usleep(20000);
		open("/dev/null", O_RDONLY);
	}
	return unused;
}

int main(int argc, char **argv)
{
	static char line[128], name[64];
	static pthread_t started;
	long (*calls)(void);
	void (*let_go)(void), (*wait_inside)(int), (*run_short)(int);
	int count;
	route = argv[1];
#ifdef __GLIBC__
	if (getenv("CLIENT_STACK")) {
		pthread_attr_t attributes;
		pthread_attr_init(&attributes);
		pthread_attr_setstacksize(&attributes, atoi(getenv("CLIENT_STACK")));
		pthread_setattr_default_np(&attributes);
	}
#endif
	if (getenv("CLIENT_DENY")) {
		int number, command = -1;
		sscanf(getenv("CLIENT_DENY"), "%d:%d", &number, &command);
		deny(number, command, 0);
	}
	if (getenv("CLIENT_IGNORE"))
		signal(atoi(getenv("CLIENT_IGNORE")), SIG_IGN);
	if (getenv("CLIENT_KILL"))
		deny(atoi(getenv("CLIENT_KILL")), -1, 1);
#ifndef LINKED
	int global = strcmp(route, "dlopen") && strncmp(route, "proc", 4);
	handle = dlopen(strcmp(route, "forward") ? "libcuda.so.1" : "libforward.so", RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL));
	if (!handle)
		return 8;
#endif
	*(void **)&calls = dlsym(handle, "stub_calls");
	*(void **)&let_go = dlsym(handle, "stub_release");
	*(void **)&run_short = dlsym(handle, "stub_short");
	*(void **)&wait_inside = dlsym(handle, "stub_wait_inside");
	while (fgets(line, sizeof line, stdin)) {
		long answer = 0;
		int lives_on = sscanf(line, "forkwait %63s", name) == 1;
		if (lives_on || sscanf(line, "fork %63s", name) == 1) {
			int status;
			pid_t child = fork();
			if (child == 0) {
				int result = make(name);
				if (lives_on)
					read(0, line, 1);
				_exit(result == 0 ? 7 : 1);
			}
			waitpid(child, &status, 0);
			answer = WIFEXITED(status) && WEXITSTATUS(status) == 7 ? 0 : status;
		} else if (sscanf(line, "threads %d %63s", &count, name) == 2) {
			answer = on_threads(count, name, 0);
		} else if (sscanf(line, "small %63s", name) == 1) {
			answer = on_threads(1, name, 1);
		} else if (sscanf(line, "start %63s", name) == 1) {
			pthread_create(&started, NULL, alone, name);
		} else if (sscanf(line, "warm %63s", name) == 1) {
			pthread_create(&started, NULL, after_another, name);
		} else if (!strncmp(line, "hidden", 6)) {
			pthread_create(&started, NULL, hidden, NULL);
		} else if (!strncmp(line, "join", 4)) {
			void *result;
			pthread_join(started, &result);
			answer = (long)result;
		} else if (sscanf(line, "signal %63s", handled) == 1) {
			signal(SIGUSR1, handler);
			raise(SIGUSR1);
			answer = handled_result;
		} else if (sscanf(line, "interrupt %63s", handled) == 1) {
			signal(SIGUSR1, handler);
			((void (*)(void))dlsym(handle, "stub_raise"))();
		} else if (sscanf(line, "jump %63s", name) == 1) {
			signal(SIGUSR1, jump_out);
			answer = sigsetjmp(before_call, 1) ? 99 : make(name);
		} else if (sscanf(line, "inside %d", &count) == 1) {
			wait_inside(count);
		} else if (sscanf(line, "short %d", &count) == 1) {
			run_short(count);
		} else if (!strncmp(line, "memory ", 7)) {
			answer = memory_info(line[7] == 't');
		} else if (sscanf(line, "total %63s", name) == 1) {
			answer = total(name);
		} else if (!strncmp(line, "devices", 7)) {
			answer = devices();
		} else if (sscanf(line, "table %63s", name) == 1) {
			answer = ask_for_table(name);
		} else if (!strncmp(line, "release", 7)) {
			let_go();
		} else if (sscanf(line, "same %63s", name) == 1) {
			answer = look_up(name) == look_up(name);
		} else if (!strncmp(line, "unload", 6)) {
			dlclose(handle);
			answer = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) != NULL;
		} else if (!strncmp(line, "closefds", 8)) {
			for (int fd = 3; fd < 4096; fd++)
				close(fd);
		} else if (!strncmp(line, "fillfds", 7)) {
			pthread_t filler;
			struct rlimit limit = {1024, 1024};
			setrlimit(RLIMIT_NOFILE, &limit);
			pthread_create(&filler, NULL, fill, NULL);
			while (open("/dev/null", O_RDONLY) >= 0)
				;
		} else if (!strncmp(line, "environ", 7)) {
			environ = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		} else if (!strncmp(line, "wait", 4)) {
			answer = waitpid(-1, NULL, WNOHANG);
			answer = answer < 0 ? -errno : answer;
		} else if (!strncmp(line, "at exit ", 8) && handlers < 4) {
			strcpy(at_exit[handlers++], line + 8);
			atexit(exit_handler);
		} else if (!strncmp(line, "count", 5)) {
			answer = calls();
		} else if (sscanf(line, "%63s", name) == 1) {
			answer = make(name);
		}
		printf("%ld\n", answer);
		fflush(stdout);
	}
	return 0;
}
