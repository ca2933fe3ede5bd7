"""Isolates a process that runs code written by a model.

The process can read the given paths and write to empty folders of its own. It has no network, sees
no other process, and can neither start one nor gain privileges.

This needs Linux: it uses namespaces, and a seccomp filter of system calls, which libseccomp
installs. A user other than root also needs permission to create user namespaces. An OSError names
the step that the machine does not allow.
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
SIZE = 128 << 20      # bytes of its own folders together, and of one file [ours]
MAX_FILES = 10_000    # files and folders in them [ours]
MAX_OPEN = 256        # files open at a time [ours]
MAX_THREADS = 200     # threads at a time [ours]
FIRST_USER = 60_000   # the first of 4,000 user ids that systems leave unused

NOT_EQUAL, MASKED = 1, 7  # libseccomp's comparisons of an argument
INT = 0xFFFFFFFF          # mask of the lower half of an argument, which the kernel reads as an int
# System calls that fail: (name,), or (name, index of an argument, comparison, two values) if the
# call fails only with such an argument.
DENIED = (
    # calls that start processes, or that reach other processes and their namespaces
    ("fork",), ("vfork",), ("execve",), ("execveat",), ("ptrace",), ("unshare",), ("setns",),
    ("clone", 0, MASKED, 0x10000, 0),            # anything but a thread
    ("prctl", 0, MASKED, INT, DIE_WITH_PARENT),  # this option must stay set
    # a filter of its own, which could kill one thread while the others wait for it
    ("seccomp",), ("prctl", 0, MASKED, INT, SET_SECCOMP),
    ("socket", 0, NOT_EQUAL, 1, 0),              # any family but AF_UNIX, which socketpair uses
    # memory that no limit counts
    ("memfd_create",), ("shmget",), ("msgget",), ("mq_open",), ("vmsplice",),
    # keys, which outlive the process
    ("add_key",), ("request_key",), ("keyctl",),
    # the kernel's own engines
    ("bpf",), ("perf_event_open",), ("userfaultfd",),
    # its resource limits: with them it could get itself killed as if from outside; reading them
    # is allowed
    ("setrlimit",), ("prlimit64", 2, NOT_EQUAL, 0, 0))
# Newer system calls, which have one number on all architectures. Libraries do without them.
NEWER = range(424, 600)


def enter(visible: list[str], own: list[str], megabytes: int, report: int | None = None) -> None:
    """Continues in a new, isolated process. The calling process waits for it to end, and exits.

    Args:
        visible: Files and folders that the process can read, under the same paths.
        own: Folders that it may write to, empty at first.
        megabytes: Limit of its address space.
        report: The last open file descriptor. The waiting process writes "ended" to it, unless
            something outside has killed the new process.

    Raises:
        OSError: The machine does not allow one of the steps.
    """
    user = FIRST_USER + os.getpid() % 4_000 if os.geteuid() == 0 else None
    seccomp = ctypes.CDLL("libseccomp.so.2")
    separate(user is not None)
    die_with_parent()  # again, since a new user namespace has cleared it
    build_root(visible, own, user)
    if process := os.fork():
        # Otherwise the client could not see that the new process has closed its files.
        os.closerange(0, report or 1 << 16)
        _, status = os.waitpid(process, 0)
        if report and status != 9:
            os.write(report, b"ended")
        os._exit(0)
    if report:
        os.close(report)
    os.setsid()  # otherwise a signal to its group would reach other episodes
    set_limits(megabytes, user)
    drop_privileges(user)
    die_with_parent()
    filter_calls(seccomp)


def call(name: str, *arguments) -> None:
    """Calls a function of the C library by its name. Raises OSError if it fails."""
    arguments = [text.encode() if isinstance(text, str) else text for text in arguments]
    if getattr(LIBC, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def die_with_parent() -> None:
    call("prctl", DIE_WITH_PARENT, 9, 0, 0, 0)


def separate(root: bool) -> None:
    """Enters new namespaces of mounts, network, processes, IPC and host names."""
    user, group = os.geteuid(), os.getegid()
    namespaces = NEW_MOUNTS | NEW_NETWORK | NEW_PIDS | NEW_IPC | NEW_NAMES
    call("unshare", namespaces if root else namespaces | NEW_USER)
    if not root:  # become root of the user namespace, who may mount there
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                           ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build_root(visible: list[str], own: list[str], user: int | None) -> None:
    """Builds a root folder that holds only the visible paths and the writable folders, which belong
    to `user`."""
    base = "/proc"  # no visible path lies there, and no other process sees this mount
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
        no_exec = os.statvfs(path).f_flag & NO_EXEC  # a user namespace may not clear this flag
        flags = REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | no_exec
        call("mount", None, target, None, flags, None)
    for path in own:
        os.makedirs(base + path, exist_ok=True)  # it may also hold a visible path
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
    # Before Linux 5.14 the limit counts all processes of the user outside, too.
    if user is not None or tuple(map(int, version)) >= (5, 14):
        limits[resource.RLIMIT_NPROC] = MAX_THREADS
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def drop_privileges(user: int | None) -> None:
    """Drops all capabilities and, if it is root outside, becomes an unused user."""
    for capability in range(64):
        LIBC.prctl(DROP_CAPABILITY, capability, 0, 0, 0)  # numbers beyond the last one fail
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def filter_calls(seccomp: ctypes.CDLL) -> None:
    """Installs the filter of system calls.

    From here on the process may start threads, but no process, and cannot open a socket with a
    network. libseccomp also sets no_new_privs, so no program gains privileges. A call with the
    numbers of another architecture (32-bit, x32) kills the whole process. libseccomp's default
    would kill only the calling thread, and the other threads would wait until the time limit.
    """
    allow, deny, kill_process, other_architecture = 0x7FFF0000, 0x50000, 0x80000000, 2
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(allow))
    failures = [seccomp.seccomp_attr_set(rules, other_architecture, ctypes.c_uint32(kill_process))]
    failures += [seccomp.seccomp_rule_add_array(rules, deny | errno.ENOSYS, number, 0, None)
                 for number in NEWER]
    for name, *comparison in DENIED:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        packed = struct.pack("IIQQ", *comparison) if comparison else None
        failures.append(seccomp.seccomp_rule_add_array(
            rules, deny | errno.EPERM, number, len(comparison) // 4, packed))
    if any([*failures, seccomp.seccomp_load(rules)]):
        raise OSError("libseccomp cannot load the filter")
