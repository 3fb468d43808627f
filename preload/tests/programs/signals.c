// Calls the driver on many threads while signals arrive whose handler calls it too.
//
//   signals <call> <call of the handler, or -> <threads>
//
// The main thread makes the call for ever; a thread sends it SIGUSR1 without a pause. With <threads> more
// than 0, that many threads make the calls of `mixed` for ever, and one more forks children that call.
// One command per line on stdin, one answer per line:
//   signals   how many signals the handler has begun to handle
//   calls     how many calls of the main thread have returned
//   children  how many forked children have ended as they should; each loads a library, which needs the loader's locks
//   stop      answers 0, and the program ends with 0
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int (*Call)();
static void *driver;
static Call call, in_handler, in_child, mixed[3];
static volatile long handled, made, children;
static volatile int stopped;
static pthread_t main_thread;

static Call look_up(const char *name)
{
	Call found = strcmp(name, "-") ? dlsym(driver, name) : NULL;
	if (!found && strcmp(name, "-"))
		exit(8);
	return found;
}

static int make(Call function)
{
	uint64_t memory[2];
	// Each function ignores the arguments that it does not have.
	return function(memory, (size_t)64, 0L);
}

static void handle(int signal)
{
	handled++;
	if (in_handler && make(in_handler))
		_exit(5);
}

static void *send_signals(void *nothing)
{
	while (!stopped) {
		pthread_kill(main_thread, SIGUSR1);
		for (volatile int turn = 0; turn < 300; turn++)
			;
	}
	return NULL;
}

static void *call_driver(void *number)
{
	Call own = mixed[(long)number % 3];
	while (!stopped) {
		if (make(own))
			_exit(4);
		usleep(50);
	}
	return NULL;
}

static void *make_children(void *nothing)
{
	while (!stopped) {
		int status;
		pid_t child = fork();
		if (child == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL); // a child that hangs does not outlive the test
			// glibc does not reset the lock of its list of objects in a child.
			void *loaded = dlopen("libutil.so.1", RTLD_NOW);
			// Result 3 is correct, too: a child has no state of its parent's driver.
			int result = make(in_child);
			_exit(loaded && (result == 0 || result == 3) ? 7 : 1);
		}
		if (child < 0 || waitpid(child, &status, 0) != child)
			_exit(6);
		if (!WIFEXITED(status) || WEXITSTATUS(status) != 7)
			_exit(6);
		children++;
	}
	return NULL;
}

static void *answer(void *nothing)
{
	char line[32];
	while (fgets(line, sizeof line, stdin)) {
		long value = 0;
		if (!strncmp(line, "signals", 7))
			value = handled;
		else if (!strncmp(line, "calls", 5))
			value = made;
		else if (!strncmp(line, "children", 8))
			value = children;
		else
			stopped = 1;
		printf("%ld\n", value);
		fflush(stdout);
	}
	stopped = 1;
	return NULL;
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
	pthread_t thread;
	sigset_t none_here;
	driver = dlopen("libcuda.so.1", RTLD_NOW);
	if (argc < 4 || !driver || look_up("cuInit")(0L))
		return 3;
	call = look_up(argv[1]);
	in_handler = look_up(argv[2]);
	// This look-up comes before any thread forks, because it walks the loader's list of objects.
	in_child = mixed[0] = look_up("cuCtxSynchronize");
	mixed[1] = look_up("cuMemAlloc_v2");
	mixed[2] = look_up("cuStreamQuery");
	main_thread = pthread_self();
	sigaction(SIGUSR1, &action, NULL);
	int threads = atoi(argv[3]);
	for (long number = 0; number < threads; number++)
		pthread_create(&thread, NULL, call_driver, (void *)number);
	if (threads)
		pthread_create(&thread, NULL, make_children, NULL);
	pthread_create(&thread, NULL, send_signals, NULL);
	pthread_create(&thread, NULL, answer, NULL);
	while (!stopped) {
		if (make(call))
			_exit(4);
		made++;
	}
	// Other threads may be in any state, so the program ends without exit handlers.
	_exit(0);
}
