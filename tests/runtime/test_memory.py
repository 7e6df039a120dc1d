import os
import subprocess
import sys

import pytest

from specjax.runtime import memory

# Where a thread allocates: in the heap of the process, or in one of its own.
HEAPS = """
import ctypes, threading
from specjax.runtime import memory
{call}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
found = []
thread = threading.Thread(target=lambda: found.append(libc.malloc(100_000)))
thread.start()
thread.join()
heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0]
low, high = (int(x, 16) for x in heap.split("-"))
print(low <= found[0] < high)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is of glibc")
@pytest.mark.parametrize(
    ("call", "platforms", "one"),
    [("memory.one_heap()", "cpu", True), ("", "cpu", False), ("memory.one_heap()", "cuda", False)],
)
def test_threads_share_a_heap_where_there_is_no_accelerator(call, platforms, one):
    environment = os.environ | {"JAX_PLATFORMS": platforms}
    command = [sys.executable, "-c", HEAPS.format(call=call)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(one)


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.keep_freed_memory()
    memory.one_heap()
    monkeypatch.setattr(memory.ctypes, "CDLL", None)
    monkeypatch.setattr(memory.os, "name", "nt")
    memory.keep_freed_memory()
