"""Memory in large pages for training on a CPU."""

import os
import sys

TUNABLE = "glibc.malloc.hugetlb=1"


def restart_with_huge_pages() -> None:
    """Start this program again with glibc's allocator asking Linux for huge pages.

    XLA's CPU client allocates the temporary memory of a step anew at each call, hundreds of
    megabytes whose pages the kernel then maps 4 kB at a time: of a step of the `small` preset
    that is a quarter of the time. glibc reads the setting when a process starts, hence the
    restart, once; a `GLIBC_TUNABLES` that is set already is left as it is, and systems without
    glibc ignore it. Call it before anything is imported that takes long.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
