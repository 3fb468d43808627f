// A libnvidia-ml.so.1 with one device. Its free bytes are the content of the file that
// STUB_NVML_FREE names, and every question is a byte more in <that file>.asked. Without
// that name it never answers, as NVML in a checkpointed process does not.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } Memory;

int nvmlInit_v2(void)
{
	while (!getenv("STUB_NVML_FREE"))
		pause();
	return 0;
}

int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)1; return 0; }

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory)
{
	char path[512];
	const char *named = getenv("STUB_NVML_FREE");
	FILE *file = fopen(named, "r");
	memset(memory, 0, sizeof *memory);
	if (file) {
		if (fscanf(file, "%llu", &memory->free) != 1)
			memory->free = 0;
		fclose(file);
	}
	snprintf(path, sizeof path, "%s.asked", named);
	if ((file = fopen(path, "a"))) {
		fputc('.', file);
		fclose(file);
	}
	return 0;
}
