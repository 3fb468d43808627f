#!/bin/sh
# Cargo's RUSTC_WORKSPACE_WRAPPER for the fuzz targets: compiles the project's own crates with the
# coverage counters that libFuzzer needs. Each counts how often an edge of the control flow is
# taken, and reports the operands of comparisons. Other crates are compiled without them.
case " $* " in
*" build_script_build "* | *" proc-macro "*) exec "$@" ;; # These run during the build.
esac
exec "$@" -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares
