"""A wrong clock for one process: a library that is loaded before the C library."""

import subprocess
from pathlib import Path

SECONDS = 3600
"""How wrong the clock is."""
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *value) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, value);
    if (clock == CLOCK_REALTIME) value->tv_sec += SKEW;
    return result;
}
"""


def clock_library(directory: Path, seconds: int) -> str:
    """The library for LD_PRELOAD, made with gcc: the wall clock is `seconds` ahead."""
    source, library = directory / "skew.c", directory / "skew.so"
    source.write_text(_SOURCE)
    flags = ("-shared", "-fPIC", f"-DSKEW={seconds}")
    subprocess.run(["gcc", *flags, "-o", library, source, "-ldl"], check=True)
    return str(library)
