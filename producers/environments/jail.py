"""The inside of a sandbox: a process of its own that isolates itself, then runs one command after another.

`penstock.producers.environments.sandbox` starts it as a script, `python -I -S jail.py SETTINGS`, with nothing but the
standard library. Requests come on standard input and replies leave on standard output, as frames: two lengths, a JSON
object, bytes. It ends, with every process in it, when its standard input does: when its sandbox is closed or whoever
opened it dies, however that happens.

With namespaces (user, mount, process, network, IPC and host name) it is process 1 of a system of its own: no network
but its own loopback, nobody else's processes, and a file system in memory in which only programs are shown, read-only.
Without them it is a process that kills whatever descends from it, and its commands see the machine's files, as a user
of their own if the producer is root.

Sources: namespaces(7), user_namespaces(7), pid_namespaces(7), mount_setattr(2), pivot_root(2), seccomp(2), prctl(2).
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # to import `typing` would take longer than the rest
    from typing import Any

    Json = dict[str, Any]
    Stats = list[tuple[int, list[bytes]]]

FRAME = struct.Struct("!II")
WORK = "/workspace"
TICK_S = 0.02
"""Between two looks at what the processes use."""
NOBODY = 65534
"""The user and group that commands run as if the producer is root."""
OWN_USERS = 1 << 30
"""The first of the users whom nobody else is: each sandbox without namespaces has one, if the producer is root."""
OTHERS = 1024
"""Processes that its user may start elsewhere while a command runs, which count in the same limit."""
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
"""What commands see of this machine's files, beside Python's own folders."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mounts, host name, IPC, users, processes, network."""
NO_SUID, NO_DEVICES, NO_PROGRAMS, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
DEATH_SIGNAL, DUMPABLE, SECCOMP, DROP_CAPABILITY, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 22, 24, 36, 38
REFUSED = {
    "x86_64": (0xC000003E, 41, (29, 68, 240, 248, 249, 250, 298, 319, 321, 323, 425, 447)),
    "aarch64": (0xC00000B7, 198, (194, 186, 180, 217, 218, 219, 241, 279, 280, 282, 425, 447)),
}
"""By machine: its number in audit records, `socket`, and the calls that no command may make: memory that no process
need have mapped (shmget, msgget, mq_open, memfd_create, memfd_secret), keyrings, perf_event_open, bpf, userfaultfd,
io_uring_setup."""
STARTING = {"x86_64": (56, 57, 58, 59, 322, 435), "aarch64": (220, 221, 281, 435)}
"""By machine, the calls that start a process, thread or program: clone, fork, vfork, execve, execveat, clone3."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the C library. Raises OSError with the function's name."""
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if value is None else os.fsencode(value) for value in (source, target, kind, options)]
    try:
        call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({target})") from None


def enter_namespaces(settings: Json) -> None:
    """Makes this process the first of new namespaces; returns in a child. The process called waits for it and ends."""
    is_root = os.geteuid() == 0
    user, group = (NOBODY, NOBODY) if is_root else (os.geteuid(), os.getegid())
    if is_root:
        os.setgroups([])
    ready, done = os.pipe()
    owner = os.getpid()
    if (mapper := os.fork()) == 0:  # only a process outside may map another user than its own
        os.close(done)
        os.read(ready, 1)
        for name, value in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/{owner}/{name}", "w", encoding="utf-8") as file:
                file.write(value)
        os._exit(0)
    call("unshare", NEW_NAMESPACES)
    os.close(done)
    if os.waitpid(mapper, 0)[1]:
        raise OSError("the user cannot be mapped")
    shown = open_shown(settings["shown"])  # before the user changes, who may be the only one to reach them
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    first = os.fork()
    if first:
        for number in (0, 1):
            os.close(number)
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    change_root(shown, settings["limits"]["disk_bytes"])
    fcntl.ioctl(_socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="utf-8") as file:
        file.write("0")  # in which a command would have capabilities again


def open_shown(folders: list[str]) -> list[tuple[str, int]]:
    """Returns path and descriptor of what is shown; of a link, of what it leads to: no command can replace that."""
    found = [(path, os.open(os.path.realpath(path), os.O_PATH)) for path in folders if os.path.isdir(path)]
    return found + [(f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH)) for name in DEVICES]


def change_root(shown: list[tuple[str, int]], disk_bytes: int) -> None:
    root = "/tmp"
    mount("none", "/", None, RECURSIVE | PRIVATE)
    options = f"size={disk_bytes},nr_inodes={max(4096, disk_bytes >> 12)},mode=755,uid=0,gid=0"
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, options)
    for path, descriptor in shown:
        os.makedirs(root + os.path.dirname(path), exist_ok=True)
        if path.startswith("/dev/"):
            os.close(os.open(root + path, os.O_CREAT, 0o600))
        else:
            os.makedirs(root + path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", root + path, None, BIND | RECURSIVE)
        attributes = struct.pack("=QQQQ", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID
        if not path.startswith("/dev/"):
            call("syscall", 442, -100, os.fsencode(root + path), 0x8000, attributes, len(attributes))  # mount_setattr
        os.close(descriptor)
    for folder in ("/proc", "/dev/shm", "/tmp", WORK):
        os.makedirs(root + folder, exist_ok=True)
    os.chmod(root + "/tmp", 0o1777)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, f"{root}/dev/{name}")
    mount("proc", root + "/proc", "proc", NO_SUID | NO_DEVICES | NO_PROGRAMS)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/")


def refuse_calls(*, network: bool, programs: bool = True) -> None:
    """Installs a filter of system calls for this process and all that it starts. programs: whether it may start any."""
    audit, socket_call, refused = REFUSED[os.uname().machine]

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    program = [step(load, 4), step(equal, audit, 1, 0), step(give, kill), step(load, 0)]
    program += [step(at_least, 0x40000000, 0, 1), step(give, deny)]  # another numbering of the same calls
    for number in refused if programs else (*refused, *STARTING[os.uname().machine]):
        program += [step(equal, number, 0, 1), step(give, deny)]
    if not network:
        program += [
            step(equal, socket_call, 0, 3),
            step(load, 16),
            step(equal, _socket.AF_UNIX, 1, 0),
            step(give, deny),
        ]
    program.append(step(give, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    filter_ = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    call("prctl", SECCOMP, 2, filter_, 0, 0)


def own_user() -> int:
    """Returns a user whom nobody else is; 0 if this process may not become one, or if that one could not run Python."""
    user = OWN_USERS + os.getpid()
    passed: set[str] = set()
    for path in map(os.path.realpath, (sys.executable, sys.prefix, sys.base_prefix)):
        while path not in passed:
            passed.add(path)
            path = os.path.dirname(path)
    is_mapped = all(is_of(user, f"/proc/self/{name}") for name in ("uid_map", "gid_map"))
    can_run = all(os.stat(each).st_mode & 0o001 for each in passed)
    return user if os.geteuid() == 0 and is_mapped and can_run else 0


def is_of(user: int, mapping: str) -> bool:
    """Returns whether a user or a group exists in this process's namespace."""
    with open(mapping, encoding="utf-8") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def num_tasks(user: int) -> int:
    """Returns the number of a user's threads, all of which the kernel's limit of processes counts."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return total


class Jail:
    """Runs commands under limits.

    settings: `limits` (see `sandbox.Limits`), `shown` (folders) and `isolation`, "namespaces" or "limits".
    """

    def __init__(self, settings: Json) -> None:
        self.limits = settings["limits"]
        self.is_alone = settings["isolation"] == "namespaces"
        self.work = WORK
        self.user = 0 if self.is_alone else own_user()
        """Of the commands; 0 if it is this process's."""
        self.child = self.status = 0
        self.cpu_before_s = 0.0
        if self.is_alone:
            enter_namespaces(settings)
        else:
            call("prctl", SUBREAPER, 1, 0, 0, 0)
            self.work = f"/tmp/penstock-sandbox-{os.getpid()}-{time.time_ns()}"
            os.mkdir(self.work, 0o700)
            if self.user:
                os.chown(self.work, self.user, self.user)
        call("prctl", DUMPABLE, 0, 0, 0, 0)

    def serve(self) -> None:
        """Answers requests until standard input ends."""
        send({"work": self.work})
        while True:
            while not select.select([0], [], [], TICK_S if self.reap() else None)[0]:
                if self.excess():
                    self.kill_all()
            if not (head := receive(FRAME.size)):
                return
            num_header, num_data = FRAME.unpack(head)
            request = json.loads(receive(num_header))
            send(*self.run(request, receive(num_data)))

    def run(self, request: Json, given: bytes) -> tuple[Json, bytes]:
        """Runs one command; returns how it ended, and its two outputs one after the other."""
        began = looked = time.monotonic()
        self.cpu_before_s = self.cpu_s(self.stats())
        ends = [os.pipe() for _ in range(4)]
        theirs = [ends[0][0], *(end[1] for end in ends[1:])]
        into, out, err, failure = ends[0][1], *(end[0] for end in ends[1:])
        self.child = os.fork()
        if self.child == 0:
            become(request, self, theirs)
        for number in theirs:
            os.close(number)
        exited = os.pidfd_open(self.child)
        output = {number: Output(number, request["output_bytes"]) for number in (out, err, failure)}
        writable, sent, ended_by, is_running = [into], 0, "", True
        os.set_blocking(into, False)
        while is_running:
            watched = [number for number, each in output.items() if each.is_open]
            readable, ready, _ = select.select([0, exited, *watched], writable, [], TICK_S)
            if 0 in readable:  # nobody asks anything during a run: whoever asked is gone
                self.end()
            if ready:
                try:
                    sent += os.write(into, given[sent : sent + 65536]) if sent < len(given) else 0
                except OSError:  # it does not read, or not any more
                    sent = len(given)
                if sent == len(given):
                    os.close(into)
                    writable = []
            is_running = exited not in readable
            for number in watched:
                output[number].read(1 if is_running else 16)
            now = time.monotonic()
            if is_running and now - looked > TICK_S:
                looked = now
                ended_by = "wall time" if now - began > request["wall_s"] else self.excess()
                if ended_by:
                    self.kill_all()
                    break
                self.reap()
        is_cut = self.reap() or self.status == signal.SIGKILL  # what is left, or the kernel's limit, may outrun a look
        if is_cut and not ended_by and (ended_by := self.excess()):
            self.kill_all()
        for number in (exited, *writable, *output):
            os.close(number)
        reply = {
            "failure": output[failure].kept.decode(errors="replace"),
            "exit_code": os.waitstatus_to_exitcode(self.status),
            "ended_by": ended_by,
            "is_truncated": output[out].is_truncated or output[err].is_truncated,
            "wall_s": time.monotonic() - began,
            "num_stdout": len(output[out].kept),
        }
        return reply, bytes(output[out].kept + output[err].kept)

    def most_tasks(self) -> int:
        """Returns the kernel's limit of processes for a command's user. It does not hold for root."""
        others = 2 if self.is_alone or self.user else num_tasks(os.geteuid()) + OTHERS
        return int(self.limits["processes"]) + others

    def excess(self) -> str:
        """Returns the limit that the processes exceed together; empty for none."""
        stats = self.stats()
        running = [pid for pid, fields in stats if fields[0] != b"Z"]
        if len(running) > self.limits["processes"]:
            return "processes"
        if sum(map(resident_bytes, running)) > self.limits["memory_bytes"]:
            return "memory"
        return "CPU time" if self.cpu_s(stats) - self.cpu_before_s > self.limits["cpu_s"] else ""

    def cpu_s(self, stats: Stats) -> float:
        """Returns the processor time of everything that has run in here."""
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = sum(sum(map(int, fields[11:15])) for _, fields in stats)
        return reaped.ru_utime + reaped.ru_stime + ticks / os.sysconf("SC_CLK_TCK")

    def stats(self) -> Stats:
        """Returns id and fields of /proc/ID/stat, from the third on, of each process in here but this one."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        found[int(name)] = file.read().rpartition(b")")[2].split()
                except OSError:  # it has ended
                    continue
        if self.is_alone:
            return list(found.items())
        inside, before = {os.getpid()}, 0
        while len(inside) > before:
            before = len(inside)
            inside |= {pid for pid, fields in found.items() if int(fields[1]) in inside}
        return [(pid, found[pid]) for pid in inside if pid in found]

    def kill_all(self) -> None:
        """Kills every process in here but this one, and waits until they have ended."""
        while self.reap():
            if self.is_alone:
                signal_each([-1], signal.SIGKILL)
            else:
                found = [pid for pid, _ in self.stats()]
                signal_each(found, signal.SIGSTOP)  # one that forks would outrun this
                signal_each(found, signal.SIGKILL)
            time.sleep(0.001)

    def reap(self) -> bool:
        """Reaps what has ended. Returns whether there are processes left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.status = status

    def end(self) -> None:
        """Ends everything in here, and this process."""
        self.kill_all()
        if not self.is_alone:
            os.system(f"chmod -R u+rwx {self.work} 2>/dev/null; rm -rf {self.work}")  # which go to any depth
        os._exit(0)


class Output:
    """What a command has written to one of its outputs; what is beyond the limit is read and dropped."""

    def __init__(self, number: int, limit: int) -> None:
        self.number, self.limit = number, limit
        self.kept, self.is_open, self.is_truncated = bytearray(), True, False
        os.set_blocking(number, False)

    def read(self, times: int) -> None:
        for _ in range(times):
            try:
                found = os.read(self.number, 65536)
            except BlockingIOError:
                return
            if not found:
                self.is_open = False
                return
            room = self.limit - len(self.kept)
            self.kept += found[:room]
            self.is_truncated |= len(found) > room


def become(request: Json, jail: Jail, ends: list[int]) -> None:
    """Makes this process the command. What goes wrong before that is told through the last of `ends`."""
    try:
        os.setsid()
        for number in (0, 1, 2):
            os.dup2(ends[number], number)
        failure = os.dup2(ends[3], 3, inheritable=False)
        os.closerange(4, 1 << 20)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        limits = jail.limits
        call("prctl", DUMPABLE, 1, 0, 0, 0)  # or its own /proc is not its own
        with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write("1000")
        for kind, most in (
            (resource.RLIMIT_CPU, int(limits["cpu_s"]) + 1),
            (resource.RLIMIT_DATA, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 65536),
            (resource.RLIMIT_NPROC, jail.most_tasks()),
        ):
            resource.setrlimit(kind, (most, most))
        if jail.user:
            os.setgroups([])
            os.setresgid(jail.user, jail.user, jail.user)
            os.setresuid(jail.user, jail.user, jail.user)
        if os.geteuid() == 0:
            for capability in range(64):
                if libc.prctl(DROP_CAPABILITY, capability, 0, 0, 0) and ctypes.get_errno() != errno.EINVAL:
                    raise OSError(f"capability {capability}: {os.strerror(ctypes.get_errno())}")
        call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        refuse_calls(network=jail.is_alone)
    except BaseException as error:
        os.write(failure, f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    argv = request["argv"]
    try:
        os.makedirs(request["cwd"], exist_ok=True)
        os.chdir(request["cwd"])
        os.execvpe(argv[0], argv, request["env"])
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0][:80]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def signal_each(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def resident_bytes(pid: int) -> int:
    """Returns the memory of a process that is no file's."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:")))
    except OSError:  # it has ended
        return 0


def receive(size: int) -> bytes:
    """Returns so many bytes of standard input; none at its end."""
    found = bytearray()
    while len(found) < size:
        if not (part := os.read(0, size - len(found))):
            return b""
        found += part
    return bytes(found)


def send(header: Json, data: bytes = b"") -> None:
    encoded = json.dumps(header).encode()
    frame = memoryview(FRAME.pack(len(encoded), len(data)) + encoded + data)
    while frame:
        frame = frame[os.write(1, frame) :]


def main() -> None:
    settings = json.loads(sys.argv[1])
    jail = Jail(settings)
    try:
        jail.serve()
    finally:
        jail.end()


if __name__ == "__main__":
    main()
