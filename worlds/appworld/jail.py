"""Shuts a process in, for code that a model wrote: it sees the files it is shown, for reading, and
an empty folder of its own; no network, no other process; it cannot start one, nor ask for rights.

For Linux alone, by its namespaces, and by seccomp, a filter of system calls. As root or not: then
in a user namespace, which the machine must allow. OSError says what it does not allow.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEW_PIDS, NEW_NETWORK = 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
RECURSIVE, PRIVATE, DETACH = 16384, 1 << 18, 2
DIE_WITH_PARENT, SECCOMP, DROP_CAPABILITY, NO_NEW_RIGHTS = 1, 22, 24, 38  # of prctl
NOBODY = 65534
KILLED = 9  # the exit status where somebody outside has killed the process
SIZE = 128 << 20  # bytes of the folder of its own, and of a file [ours]

# machine -> its number for seccomp; pivot_root, capset; clone, clone3; what starts processes or
# reaches namespaces and other processes: execve, execveat, ptrace, unshare, setns, fork, vfork
MACHINES = {"x86_64": (0xC000003E, 155, 126, 56, 435, (59, 322, 101, 272, 308, 57, 58)),
            "aarch64": (0xC00000B7, 41, 91, 220, 435, (221, 281, 117, 97, 268))}


def enter(shown: list[str], own: list[str], megabytes: int) -> None:
    """Goes on in a new process that is shut in; the one that called waits for its end and ends.

    Args:
        shown: files and folders that it sees, where they are, for reading.
        own: folders that it may write in, empty at first.
        megabytes: of its address space.

    Raises:
        OSError: the machine allows one of the steps to nobody.
    """
    root = os.geteuid() == 0
    separate(root)
    build(shown, own, root)
    if process := os.fork():
        os.closerange(0, 1 << 16)  # else nobody could see the other's end
        _, status = os.waitpid(process, 0)
        os._exit(KILLED if status == 9 else 0)
    limit(megabytes)
    give_up_rights(root)
    die_with_parent()
    filter_calls()


def call(name: str, *arguments) -> None:
    """A function of the C library by its name; OSError where it fails."""
    arguments = [text.encode() if isinstance(text, str) else text for text in arguments]
    if getattr(LIBC, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def machine() -> tuple:
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(f"no {sys.platform} on {platform.machine()}, but Linux on "
                      f"{' or '.join(MACHINES)} is known")
    return MACHINES[platform.machine()]


def die_with_parent() -> None:
    call("prctl", DIE_WITH_PARENT, 9, 0, 0, 0)


def separate(root: bool) -> None:
    """New namespaces: mounts, network, processes and names of its own."""
    user, group = os.geteuid(), os.getegid()
    machine()
    wanted = NEW_MOUNTS | NEW_NETWORK | NEW_PIDS | NEW_IPC | NEW_NAMES
    call("unshare", wanted if root else wanted | NEW_USER)
    if not root:  # in its user namespace it is root, which may mount there
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"),
                           ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build(shown: list[str], own: list[str], root: bool) -> None:
    """A root folder with nothing in it but what is shown and what is its own."""
    base = "/proc"  # nothing that is shown lies there; no other process sees what is mounted
    call("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    call("mount", "none", base, "tmpfs", NO_SUID | NO_DEVICES, f"size={SIZE},mode=755")
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
        if root:
            os.chown(base + path, NOBODY, NOBODY)
    os.mkdir(f"{base}/old")
    if LIBC.syscall(machine()[1], base.encode(), f"{base}/old".encode()):
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    call("umount2", "/old", DETACH)
    os.rmdir("/old")


def limit(megabytes: int) -> None:
    for what, most in ((resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_FSIZE, SIZE),
                       (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))


def give_up_rights(root: bool) -> None:
    """Becomes nobody, or root of nothing; no program that it starts has more."""
    for capability in range(64):
        LIBC.prctl(DROP_CAPABILITY, capability, 0, 0, 0)  # those beyond the last one fail
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if LIBC.syscall(machine()[2], header, none):
        raise OSError(ctypes.get_errno(), "capset")
    call("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)


def filter_calls() -> None:
    """From here on it may start threads, but no process."""
    architecture, _, _, clone, clone3, refused = machine()
    load, equal, at_least, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    no, unknown, yes, kill = 0x50001, 0x50026, 0x7FFF0000, 0x80000000  # EPERM, ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill),
               (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), (end, 0, 0, no)]
    for number in refused:
        program += [(equal, 0, 1, number), (end, 0, 0, no)]
    program += [(equal, 0, 1, clone3), (end, 0, 0, unknown),  # then the C library uses clone
                (equal, 0, 3, clone), (load, 0, 0, 16),
                (bits, 1, 0, 0x10000), (end, 0, 0, no),       # no thread
                (end, 0, 0, yes)]
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    held = ctypes.create_string_buffer(code)
    told = struct.pack("HxxxxxxP", len(program), ctypes.addressof(held))
    call("prctl", SECCOMP, 2, told, 0, 0)
