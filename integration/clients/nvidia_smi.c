/* nvidia-smi of the simulated GPU: nvidia-smi --query-gpu=FIELD,... --format=csv,noheader,nounits
 *
 * Prints the values of the few fields below, from libnvidia-ml.so.1. One line per device, memory in MiB. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned long long total, free, used;
} Memory;

static int fail(const char *what) {
    fprintf(stderr, "nvidia-smi (simulated): %s\n", what);
    return 1;
}

static void print(const char *fields, const char *name, const Memory *memory) {
    char copy[256], *rest = copy;
    snprintf(copy, sizeof copy, "%s", fields);
    for (char *field = strtok_r(rest, ",", &rest), *first = field; field; field = strtok_r(NULL, ",", &rest)) {
        if (field != first)
            printf(", ");
        if (!strcmp(field, "name"))
            printf("%s", name);
        else if (!strcmp(field, "memory.free"))
            printf("%llu", memory->free >> 20);
        else if (!strcmp(field, "memory.used"))
            printf("%llu", memory->used >> 20);
        else if (!strcmp(field, "memory.total"))
            printf("%llu", memory->total >> 20);
        else
            printf("[N/A]");
    }
    printf("\n");
}

int main(int argc, char **argv) {
    const char *fields = NULL;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "--query-gpu=", 12))
            fields = argv[i] + 12;
        else if (strcmp(argv[i], "--format=csv,noheader,nounits"))
            return fail("only --query-gpu and --format=csv,noheader,nounits are simulated");
    }
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!fields || !nvml)
        return fail(fields ? dlerror() : "nothing asked");
    int (*init)(void) = dlsym(nvml, "nvmlInit_v2");
    int (*count)(unsigned *) = dlsym(nvml, "nvmlDeviceGetCount_v2");
    int (*by_index)(unsigned, void **) = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*name_of)(void *, char *, unsigned) = dlsym(nvml, "nvmlDeviceGetName");
    int (*memory_of)(void *, Memory *) = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    unsigned devices = 0;
    if (!init || !count || !by_index || !name_of || !memory_of || init() || count(&devices))
        return fail("the driver does not answer");
    for (unsigned index = 0; index < devices; index++) {
        void *device;
        char name[96];
        Memory memory;
        if (by_index(index, &device) || name_of(device, name, sizeof name) || memory_of(device, &memory))
            return fail("a device does not answer");
        print(fields, name, &memory);
    }
    return 0;
}
