"""Shuts a process in, for code that a model wrote: it sees the files it is shown, for reading, and
an empty folder of its own; no network, no other process; it cannot start one, nor ask for rights.

For Linux alone, by its namespaces, and by seccomp, a filter of system calls. As root or not: then
in a user namespace, which the machine must allow. OSError says what it does not allow.
"""

import ctypes
import os
import platform
import re
import resource
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEW_PIDS, NEW_NETWORK = 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND = 1, 2, 4, 8, 32, 4096
RECURSIVE, PRIVATE, DETACH = 16384, 1 << 18, 2
DIE_WITH_PARENT, SECCOMP, DROP_CAPABILITY, NO_NEW_RIGHTS = 1, 22, 24, 38  # of prctl
KILLED = 9  # the exit status where somebody outside has killed the process
SIZE = 128 << 20  # bytes of the folder of its own, and of a file [ours]
FILES = 10_000    # there [ours]
OPEN = 256        # files that are open at a time [ours]
THREADS = 200     # [ours]
USERS = 60_000    # from here on 4,000 numbers of users that systems leave unused

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below; for seccomp
CALLS = {"pivot_root": (155, 41), "capset": (126, 91), "clone": (56, 220), "prctl": (157, 167),
         "socket": (41, 198), "prlimit64": (302, 261)}
REFUSED = {
    # what starts processes, or reaches others and their namespaces
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "unshare": (272, 97), "setns": (308, 268),
    # memory that no limit counts
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "mq_open": (240, 180),
    "vmsplice": (278, 75),
    # keys, which stay when a process has ended
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # the kernel's own engines
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    # its limits, by which it could have itself killed as if from outside
    "setrlimit": (160, 164)}
NEWER = 424  # calls from here on are one number on all machines; libraries do without them


def enter(shown: list[str], own: list[str], megabytes: int) -> None:
    """Goes on in a new process that is shut in; the one that called waits for its end and ends.

    Args:
        shown: files and folders that it sees, where they are, for reading.
        own: folders that it may write in, empty at first.
        megabytes: of its address space.

    Raises:
        OSError: the machine allows one of the steps to nobody.
    """
    user = USERS + os.getpid() % 4_000 if os.geteuid() == 0 else None
    separate(user is not None)
    die_with_parent()  # a new user namespace has undone it
    build(shown, own, user)
    if process := os.fork():
        os.closerange(0, 1 << 16)  # else nobody could see the other's end
        _, status = os.waitpid(process, 0)
        os._exit(KILLED if status == 9 else 0)
    os.setsid()  # else a signal to its group reaches other episodes
    limit(megabytes, user)
    give_up_rights(user)
    die_with_parent()
    filter_calls()


def call(name: str, *arguments) -> None:
    """A function of the C library by its name; OSError where it fails."""
    arguments = [text.encode() if isinstance(text, str) else text for text in arguments]
    if getattr(LIBC, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def machine() -> tuple[int, int]:
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(f"no {sys.platform} on {platform.machine()}, but Linux on "
                      f"{' or '.join(MACHINES)} is known")
    return MACHINES[platform.machine()]


def system_call(name: str, *arguments) -> None:
    """One that the C library has no function for; OSError where it fails."""
    column, _ = machine()
    if LIBC.syscall(CALLS[name][column], *arguments):
        raise OSError(ctypes.get_errno(), name)


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
    system_call("pivot_root", base.encode(), f"{base}/old".encode())
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
    """Becomes a user without rights, or root of nothing; no program that it starts has more."""
    for capability in range(64):
        LIBC.prctl(DROP_CAPABILITY, capability, 0, 0, 0)  # those beyond the last one fail
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    system_call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    call("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)


def filter_calls() -> None:
    """From here on it may start threads, but no process, and make no socket that has a network."""
    column, architecture = machine()
    load, equal, at_least, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    no, unknown, yes, kill = 0x50001, 0x50026, 0x7FFF0000, 0x80000000  # EPERM, ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill),
               (load, 0, 0, 0), (at_least, 0, 1, NEWER), (end, 0, 0, unknown)]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            program += [(equal, 0, 1, numbers[column]), (end, 0, 0, no)]
    # A call; where which argument's half lies; how it is compared with what; what it must come to.
    for name, place, how, value, wanted in (
            ("clone", 16, bits, 0x10000, True),             # a thread
            ("prctl", 16, equal, DIE_WITH_PARENT, False),   # which stays as it is
            ("socket", 16, equal, 1, True),                 # AF_UNIX, as a pair
            ("prlimit64", 32, equal, 0, True), ("prlimit64", 36, equal, 0, True)):  # it only asks
        program += [(load, 0, 0, 0), (equal, 0, 3, CALLS[name][column]), (load, 0, 0, place),
                    (how, wanted, not wanted, value), (end, 0, 0, no)]
    program += [(end, 0, 0, yes)]
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    held = ctypes.create_string_buffer(code)
    told = struct.pack("HxxxxxxP", len(program), ctypes.addressof(held))
    call("prctl", SECCOMP, 2, told, 0, 0)
