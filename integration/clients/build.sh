#!/bin/sh
# Builds the client programs into a folder: build.sh FOLDER
# Needs a C compiler (CC, otherwise gcc) and libc's headers, but neither a CUDA toolkit nor a driver.
set -eu

src=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh FOLDER}
cc=${CC:-gcc}
flags="-std=gnu11 -O1 -g -Wall -Wextra -Wno-unused-parameter"
mkdir -p "$out"
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT

build() { # NAME SOURCE... [FLAG...]
    name=$1
    shift
    # Built under another name and then renamed, because a running program's file cannot be overwritten.
    (cd "$src" && $cc $flags -o "$out/.$name.new" "$@" && mv "$out/.$name.new" "$out/$name")
}

(cd "$src" && $cc $flags -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" stub.c)
(cd "$src" && $cc $flags -DSTUB -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o "$stub/libnvidia-ml.so.1" nvml.c)

build linked main_worker.c worker.c client.c load_linked.c "$stub/libcuda.so.1" -ldl -lpthread
build dlopen_dlsym main_worker.c worker.c client.c load_dlsym.c -ldl -lpthread
build ptds main_worker.c worker.c client.c load_dlsym.c -DPTDS -ldl -lpthread
build proc_address_v1 main_worker.c worker.c client.c load_proc_address.c -DVERSION=1 -ldl -lpthread
build proc_address_v2 main_worker.c worker.c client.c load_proc_address.c -DVERSION=2 -ldl -lpthread
build fork_then_use fork_then_use.c worker.c client.c load_dlsym.c -ldl -lpthread
build threads threads.c client.c load_dlsym.c -ldl -lpthread
build crashers crashers.c client.c load_dlsym.c -ldl
build hazards hazards.c client.c load_dlsym.c -ldl -lpthread
build exits exits.c client.c load_dlsym.c -ldl
build hidden hidden.c client.c load_dlsym.c -ldl -lpthread
build no_checkpoint no_checkpoint.c client.c load_dlsym.c -ldl -lpthread
build checkpoint checkpoint.c client.c -ldl
build nvml nvml.c client.c load_dlsym.c -ldl -lpthread
build nvml_linked nvml.c client.c load_dlsym.c -DLINKED "$stub/libnvidia-ml.so.1" -ldl -lpthread
build nvidia-smi nvidia_smi.c -ldl
build api_check api_check.c client.c load_dlsym.c -ldl -lpthread
build segments segments.c client.c load_dlsym.c -ldl
build pools pools.c client.c load_dlsym.c -ldl
build ipc ipc.c client.c load_dlsym.c -ldl
build runtime runtime.c client.c load_proc_address.c -DVERSION=2 -ldl -lpthread
build tools tools.c client.c load_dlsym.c -Wl,-rpath,'$ORIGIN' -ldl -lpthread
build constructor constructor.c client.c load_dlsym.c -Wl,-rpath,'$ORIGIN' -ldl -lpthread
build libconstructor.so constructor.c -DLIBRARY -shared -fPIC -ldl
build libcupti.so.12 cupti.c -shared -fPIC -Wl,-soname,libcupti.so.12 -ldl -lpthread
build limiter.so limiter.c -shared -fPIC -fvisibility=hidden -ldl -lpthread
build memory_check memory_check.c client.c load_dlsym.c -ldl -lpthread
cp "$src/ctypes_worker.py" "$out/.ctypes_worker.py.new"
chmod 755 "$out/.ctypes_worker.py.new"
mv "$out/.ctypes_worker.py.new" "$out/ctypes_worker.py"
