"""Shuts a process in, for code that a model wrote: it sees the files it is shown, for reading, and
an empty folder of its own; no network, no other process; it cannot start one, nor ask for rights.

For Linux alone, by its namespaces, and by libseccomp's filter of system calls. As root or not: then
in a user namespace, which the machine must allow. OSError says what it does not allow.
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
DIE_WITH_PARENT, SET_SECCOMP, DROP_CAPABILITY = 1, 22, 24  # of prctl
SIZE = 128 << 20  # bytes of the folder of its own, and of a file [ours]
FILES = 10_000    # there [ours]
OPEN = 256        # files that are open at a time [ours]
THREADS = 200     # [ours]
USERS = 60_000    # from here on 4,000 numbers of users that systems leave unused

NOT_EQUAL, MASKED = 1, 7  # how libseccomp compares an argument
INT = 0xFFFFFFFF          # the half of one that the kernel reads as a number
REFUSED = (  # (call, argument's number, how it is compared, two values); or the call alone
    # what starts processes, or reaches others and their namespaces
    ("fork",), ("vfork",), ("execve",), ("execveat",), ("ptrace",), ("unshare",), ("setns",),
    ("clone", 0, MASKED, 0x10000, 0),            # all but a thread
    ("prctl", 0, MASKED, INT, DIE_WITH_PARENT),  # which stays as it is
    # a filter of its own, which may kill one thread and leave the others waiting for it
    ("seccomp",), ("prctl", 0, MASKED, INT, SET_SECCOMP),
    ("socket", 0, NOT_EQUAL, 1, 0),              # all but AF_UNIX, as a pair
    # memory that no limit counts
    ("memfd_create",), ("shmget",), ("msgget",), ("mq_open",), ("vmsplice",),
    # keys, which stay when a process has ended
    ("add_key",), ("request_key",), ("keyctl",),
    # the kernel's own engines
    ("bpf",), ("perf_event_open",), ("userfaultfd",),
    # its limits, by which it could have itself killed as if from outside; it may ask for them
    ("setrlimit",), ("prlimit64", 2, NOT_EQUAL, 0, 0))
NEWER = range(424, 600)  # calls of one number on all machines; libraries do without them


def enter(shown: list[str], own: list[str], megabytes: int, report: int | None = None) -> None:
    """Goes on in a new process that is shut in; the one that called waits for its end and ends.

    Args:
        shown: files and folders that it sees, where they are, for reading.
        own: folders that it may write in, empty at first.
        megabytes: of its address space.
        report: the last file that is open: there the one that waits says "ended", unless somebody
            outside has killed the new process.

    Raises:
        OSError: the machine allows one of the steps to nobody.
    """
    user = USERS + os.getpid() % 4_000 if os.geteuid() == 0 else None
    seccomp = ctypes.CDLL("libseccomp.so.2")
    separate(user is not None)
    die_with_parent()  # a new user namespace has undone it
    build(shown, own, user)
    if process := os.fork():
        os.closerange(0, report or 1 << 16)  # else nobody could see the other's end
        _, status = os.waitpid(process, 0)
        if report and status != 9:
            os.write(report, b"ended")
        os._exit(0)
    if report:
        os.close(report)
    os.setsid()  # else a signal to its group reaches other episodes
    limit(megabytes, user)
    give_up_rights(user)
    die_with_parent()
    filter_calls(seccomp)


def call(name: str, *arguments) -> None:
    """A function of the C library by its name; OSError where it fails."""
    arguments = [text.encode() if isinstance(text, str) else text for text in arguments]
    if getattr(LIBC, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def die_with_parent() -> None:
    call("prctl", DIE_WITH_PARENT, 9, 0, 0, 0)


def separate(root: bool) -> None:
    """New namespaces: mounts, network, processes and names of its own."""
    user, group = os.geteuid(), os.getegid()
    wanted = NEW_MOUNTS | NEW_NETWORK | NEW_PIDS | NEW_IPC | NEW_NAMES
    call("unshare", wanted if root else wanted | NEW_USER)
    if not root:  # in its user namespace it is root, which may mount there
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                           ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build(shown: list[str], own: list[str], user: int | None) -> None:
    """A root folder with nothing in it but what is shown and what is its own, a user's."""
    base = "/proc"  # nothing that is shown lies there; no other process sees what is mounted
    call("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    most = f"size={SIZE},nr_inodes={FILES},mode=755"
    call("mount", "none", base, "tmpfs", NO_SUID | NO_DEVICES, most)
    for path in shown:
        place = base + path
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            open(place, "w").close()
        call("mount", path, place, None, BIND, None)
        kept = os.statvfs(path).f_flag & NO_EXEC  # no user namespace may take it away
        flags = REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept
        call("mount", None, place, None, flags, None)
    for path in own:
        os.makedirs(base + path, exist_ok=True)  # also one that holds what is shown
        if user is not None:
            os.chown(base + path, user, user)
    os.mkdir(f"{base}/old")
    call("pivot_root", base, f"{base}/old")
    os.chdir("/")
    call("umount2", "/old", DETACH)
    os.rmdir("/old")


def limit(megabytes: int, user: int | None) -> None:
    most = {resource.RLIMIT_AS: megabytes << 20, resource.RLIMIT_FSIZE: SIZE,
            resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: OPEN}
    version = re.match(r"(\d+)\.(\d+)", os.uname().release).groups()
    if user is not None or tuple(map(int, version)) >= (5, 14):  # before, all of a person's count
        most[resource.RLIMIT_NPROC] = THREADS
    for what, value in most.items():
        resource.setrlimit(what, (value, value))


def give_up_rights(user: int | None) -> None:
    """Becomes a user without rights, or root of nothing."""
    for capability in range(64):
        LIBC.prctl(DROP_CAPABILITY, capability, 0, 0, 0)  # those beyond the last one fail
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def filter_calls(seccomp: ctypes.CDLL) -> None:
    """Installs the filter of system calls: from here on the process may start threads, but no
    process, and make no socket that has a network; and no program that it starts has more rights.
    A call by another architecture's numbers (32-bit, x32) kills the process with all threads."""
    allow, refuse, kill_process, other_architecture = 0x7FFF0000, 0x50000, 0x80000000, 2
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(allow))
    done = [seccomp.seccomp_attr_set(rules, other_architecture, ctypes.c_uint32(kill_process))]
    done += [seccomp.seccomp_rule_add_array(rules, refuse | errno.ENOSYS, number, 0, None)
            for number in NEWER]
    for name, *compared in REFUSED:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        told = struct.pack("IIQQ", *compared) if compared else None
        done.append(seccomp.seccomp_rule_add_array(
            rules, refuse | errno.EPERM, number, len(compared) // 4, told))
    if any([*done, seccomp.seccomp_load(rules)]):
        raise OSError("libseccomp does not load the filter")
