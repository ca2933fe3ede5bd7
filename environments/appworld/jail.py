"""Isolates a process that runs code written by a model.

The isolated process can read only the given paths, and can write only to its own folders, which are
empty at first. It has no network. It cannot see other processes, start new ones or gain privileges.

The isolation needs Linux, because it uses namespaces and a seccomp filter for system calls. The
library libseccomp installs the filter. A user who is not root also needs permission to create user
namespaces. If the machine does not allow a step of the isolation, `enter` raises an OSError that
names the step.
"""

import ctypes
import errno
import os
import re
import resource
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEW_PIDS, NEW_NETWORK = 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
RECURSIVE, PRIVATE, DETACH = 16384, 1 << 18, 2
DIE_WITH_PARENT, SET_SECCOMP, DROP_CAPABILITY = 1, 22, 24  # options of prctl
# Limits of an isolated process [ours]
SIZE = 128 << 20      # maximum number of bytes in a file, and in all writable folders together
MAX_FILES = 10_000    # maximum number of files and folders in writable folders
MAX_OPEN = 256        # maximum number of open files
MAX_THREADS = 200     # maximum number of threads
FIRST_USER = 60_000   # the first of 4,000 user ids that Linux systems leave unused

NOT_EQUAL, MASKED = 1, 7  # libseccomp's comparisons of an argument
INT = 0xFFFFFFFF          # mask of the lower 32 bits, for arguments that the kernel reads as int
# The filter makes these system calls fail.
DENIED = (
    # calls that start processes, or that access other processes or their namespaces
    "fork vfork execve execveat ptrace unshare setns "
    # calls that install another filter. That filter could kill one thread, and the other threads
    # would wait for the killed thread.
    "seccomp "
    # calls that allocate memory outside the address space. The memory limit ignores such memory.
    "memfd_create shmget msgget mq_open vmsplice "
    # calls that store keys in the kernel. These keys remain after the process has ended.
    "add_key request_key keyctl "
    # calls that use kernel interfaces with a large attack surface
    "bpf perf_event_open userfaultfd "
    # calls that change resource limits. With a low limit, the kernel would kill the process with
    # SIGKILL, which looks like a failure of the machine, and not of the agent's code.
    "setrlimit").split()
# With (name, index, comparison, a, b), a call fails only if its argument x at this index satisfies
# the comparison: NOT_EQUAL is x != a, and MASKED is (x & a) == b.
DENIED_IF = (
    ("clone", 0, MASKED, 0x10000, 0),            # clone fails unless it starts a thread
    ("prctl", 0, MASKED, INT, DIE_WITH_PARENT),  # undoes `die_with_parent`
    ("prctl", 0, MASKED, INT, SET_SECCOMP),      # installs another filter, see above
    ("socket", 0, NOT_EQUAL, 1, 0),              # fails unless the address family is AF_UNIX (1)
    ("prlimit64", 2, NOT_EQUAL, 0, 0))           # changes resource limits, see above
# Numbers of newer system calls. They fail with ENOSYS, so that libraries use older calls instead.
NEWER = range(424, 600)


def enter(visible: list[str], own: list[str], megabytes: int, report: int) -> None:
    """Continues the program in a new, isolated process.

    This function returns only in the new process. The calling process waits until the new process
    ends, and then exits without returning.

    Args:
        visible: Files and folders that the new process can read, under the same paths.
        own: Folders to which the new process can write. They are empty at first.
        megabytes: Maximum address space of the new process, in MiB.
        report: File descriptor to which the calling process writes "ended" when the new process
            ends, unless SIGKILL ended it. File descriptors above `report` must be closed.
    """
    user = FIRST_USER + os.getpid() % 4_000 if os.geteuid() == 0 else None
    seccomp = ctypes.CDLL("libseccomp.so.2")
    separate(user is not None)
    die_with_parent()  # repeated, because entering a user namespace resets this setting
    build_root(visible, own, user)
    if process := os.fork():
        # The client notices the end of the new process only if no other copy of its sockets exists.
        os.closerange(0, report)
        _, status = os.waitpid(process, 0)
        if status != 9:
            os.write(report, b"ended")
        os._exit(0)
    os.close(report)
    os.setsid()  # a signal to the process group then does not reach other episodes
    set_limits(megabytes, user)
    drop_privileges(user)
    die_with_parent()
    filter_calls(seccomp)


def call(name: str, *arguments) -> None:
    """Calls a function of the C library. Raises OSError if the function fails."""
    arguments = [text.encode() if isinstance(text, str) else text for text in arguments]
    if getattr(LIBC, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def die_with_parent() -> None:
    call("prctl", DIE_WITH_PARENT, 9, 0, 0, 0)


def separate(root: bool) -> None:
    """Enters new namespaces for mounts, network, processes, IPC and host name.

    A user who is not root also enters a new user namespace.
    """
    user, group = os.geteuid(), os.getegid()
    namespaces = NEW_MOUNTS | NEW_NETWORK | NEW_PIDS | NEW_IPC | NEW_NAMES
    call("unshare", namespaces if root else namespaces | NEW_USER)
    if not root:  # become root inside the user namespace, because only root can mount
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                           ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build_root(visible: list[str], own: list[str], user: int | None) -> None:
    """Replaces the root folder with a new folder that contains only the given paths.

    Args:
        visible: Files and folders that are mounted read-only.
        own: Folders that are created empty and writable.
        user: User id of the owner of the folders in `own`, or None for the current user.
    """
    # No visible path is below /proc, and this process has its own mount namespace. It can therefore
    # mount the new root folder, a tmpfs, over /proc.
    base = "/proc"
    call("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    limits = f"size={SIZE},nr_inodes={MAX_FILES},mode=755"
    call("mount", "none", base, "tmpfs", NO_SUID | NO_DEVICES, limits)
    for path in visible:
        target = base + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        call("mount", path, target, None, BIND, None)
        # In a user namespace, the kernel refuses a remount that clears the flag noexec.
        no_exec = os.statvfs(path).f_flag & NO_EXEC
        flags = REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | no_exec
        call("mount", None, target, None, flags, None)
    for path in own:
        os.makedirs(base + path, exist_ok=True)
        if user is not None:
            os.chown(base + path, user, user)
    os.mkdir(f"{base}/old")
    call("pivot_root", base, f"{base}/old")
    os.chdir("/")
    call("umount2", "/old", DETACH)
    os.rmdir("/old")


def set_limits(megabytes: int, user: int | None) -> None:
    limits = {resource.RLIMIT_AS: megabytes << 20, resource.RLIMIT_FSIZE: SIZE,
            resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: MAX_OPEN}
    version = re.match(r"(\d+)\.(\d+)", os.uname().release).groups()
    # Before Linux 5.14, RLIMIT_NPROC also counts processes outside the namespace. The limit is then
    # set only if the process gets its own user id.
    if user is not None or tuple(map(int, version)) >= (5, 14):
        limits[resource.RLIMIT_NPROC] = MAX_THREADS
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def drop_privileges(user: int | None) -> None:
    for capability in range(64):
        LIBC.prctl(DROP_CAPABILITY, capability, 0, 0, 0)  # fails for unused capability numbers
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def filter_calls(seccomp: ctypes.CDLL) -> None:
    """Installs the seccomp filter for system calls.

    libseccomp also sets no_new_privs, so the process cannot gain privileges. A system call of a
    different architecture (32-bit or x32) kills the whole process. By default, libseccomp kills
    only the calling thread, and the other threads would wait for it until the time limit.
    """
    allow, deny, kill_process, other_architecture = 0x7FFF0000, 0x50000, 0x80000000, 2
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(allow))
    failures = [seccomp.seccomp_attr_set(rules, other_architecture, ctypes.c_uint32(kill_process))]
    failures += [seccomp.seccomp_rule_add_array(rules, deny | errno.ENOSYS, number, 0, None)
                 for number in NEWER]

    def add(name: str, comparisons: int, packed: bytes | None) -> int:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        return seccomp.seccomp_rule_add_array(
            rules, deny | errno.EPERM, number, comparisons, packed)

    failures += [add(name, 0, None) for name in DENIED]
    failures += [add(name, 1, struct.pack("IIQQ", *comparison)) for name, *comparison in DENIED_IF]
    if any([*failures, seccomp.seccomp_load(rules)]):
        raise OSError("libseccomp cannot load the filter")
