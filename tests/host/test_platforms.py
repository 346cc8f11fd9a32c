"""Systems without forks and memory files: the library loads there, and opening a driver names the platform."""

from __future__ import annotations

import pytest

from .support import run_child

ELSEWHERE = """
import sys
platform = sys.argv[1]

# What the standard library loads of its own system has to be there before it is taken away.
import asyncio, concurrent.futures, ctypes, importlib.metadata, mmap, multiprocessing.context, os, platform as _
import multiprocessing.connection, multiprocessing.resource_sharer, pathlib, signal, socket, subprocess, tempfile
import numpy

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

linux = {
    os: ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "O_TMPFILE", "pidfd_open", "sched_getaffinity"),
    mmap: ("MADV_DONTFORK", "MAP_NORESERVE", "MAP_POPULATE"),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC"),
}
unix = {
    os: ("fork", "register_at_fork", "getuid", "geteuid", "O_CLOEXEC", "O_NOFOLLOW", "WNOHANG", "pread", "pwrite"),
    mmap: ("MAP_SHARED", "MAP_PRIVATE", "PROT_READ", "PROT_WRITE"),
    socket: ("AF_UNIX", "SOCK_SEQPACKET", "SCM_RIGHTS", "send_fds", "recv_fds"),
    signal: ("SIGKILL", "SIGALRM", "setitimer", "pthread_sigmask"),
}
missing = {"cuda"}  # it looks at the platform by itself
for there in [linux] if platform == "darwin" else [linux, unix]:
    for module, names in there.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
if platform == "win32":
    missing |= {"fcntl", "resource", "pwd", "grp", "termios"}
    for name in missing:
        sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
sys.platform = platform

import remap
"""


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_every_name_loads(platform: str) -> None:
    """Every public name can be had, whatever the system has not (A10)."""
    program = """
for name in remap.__all__:
    getattr(remap, name)
print("ok")
"""
    assert run_child(ELSEWHERE + program, platform) == "ok\n"


@pytest.mark.parametrize("platform", ["win32", "darwin"])
@pytest.mark.parametrize("driver", ["", "host"])
def test_opening_a_driver_names_the_platform(platform: str, driver: str) -> None:
    """Opening a driver says which system this is, and what there is to do (A10)."""
    program = """
try:
    remap.allocate(1)
except remap.DriverNotFoundError as error:
    said = str(error)
    assert f"it is made of Linux memory files, and this platform is {platform}" in said, said
    assert "Use Linux, or a container with it" in said, said
    print("ok")
"""
    assert run_child(ELSEWHERE + program, platform, REMAP_DRIVER=driver, CUDA_VISIBLE_DEVICES="") == "ok\n"
