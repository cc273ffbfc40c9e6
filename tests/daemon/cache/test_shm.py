"""Shared memory: really there, never resized, without a name, and read-only for everyone else."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd.cache import shm
from expertd_protocol.errors import OutOfMemory

PAGE = mmap.PAGESIZE
ROOT = Path(__file__).parents[3]

linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd and seals are Linux's")


def _open_fds() -> set[int]:
    return {fd for fd in range(256) if _is_open(fd)}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    gc.collect()  # what other tests left is not counted
    before = _open_fds()
    yield
    assert _open_fds() == before


@contextlib.contextmanager
def created(nbytes: int, *, workers_write: bool = False) -> Iterator[shm.SharedMemory]:
    memory = shm.create(nbytes, workers_write=workers_write)
    try:
        yield memory
    finally:
        memory.close()


def test_what_the_daemon_writes_a_worker_reads() -> None:
    with created(4 * PAGE) as memory:
        assert bytes(memory.buffer) == bytes(4 * PAGE)
        memory.buffer[PAGE : PAGE + 5] = b"bytes"
        with mmap.mmap(memory.share_fd, 4 * PAGE, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            assert view[PAGE : PAGE + 5] == b"bytes"
            memory.buffer[PAGE] = ord("B")
            assert view[PAGE : PAGE + 5] == b"Bytes"


@linux
@pytest.mark.parametrize("workers_write", [False, True])
def test_every_page_is_really_allocated_so_that_a_touch_cannot_be_sigbus_C07(
    workers_write: bool,
) -> None:
    with created(256 * PAGE, workers_write=workers_write) as memory:
        info = os.fstat(memory.share_fd)
        assert info.st_size == 256 * PAGE
        assert info.st_blocks * 512 >= 256 * PAGE


@linux
@pytest.mark.parametrize("workers_write", [False, True])
def test_no_one_can_change_its_size(workers_write: bool) -> None:
    with created(4 * PAGE, workers_write=workers_write) as memory:
        writable = (
            os.open(f"/proc/self/fd/{memory._fd}", os.O_RDWR) if workers_write else memory._fd
        )
        try:
            for size in (0, 3 * PAGE, 5 * PAGE):
                with pytest.raises(PermissionError):
                    os.ftruncate(writable, size)
        finally:
            if workers_write:
                os.close(writable)
        assert os.fstat(memory.share_fd).st_size == 4 * PAGE


def test_a_worker_cannot_map_it_writable() -> None:
    with created(PAGE) as memory:
        with pytest.raises(PermissionError):
            mmap.mmap(memory.share_fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(memory.share_fd, b"x")
        assert memory.buffer[0] == 0


@linux
def test_a_worker_cannot_open_it_again_for_writing() -> None:
    """Even root, whom file modes do not stop, meets the seal."""
    with created(PAGE) as memory:
        try:
            again = os.open(f"/proc/self/fd/{memory.share_fd}", os.O_RDWR)
        except PermissionError:
            return
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
        finally:
            os.close(again)
        memory.buffer[0] = 7  # the daemon's own mapping still writes


@linux
def test_its_mode_lets_no_one_open_it_again() -> None:
    with created(PAGE) as memory:
        assert os.fstat(memory.share_fd).st_mode & 0o777 == 0o400


def test_a_worker_writes_its_own_page() -> None:
    with (
        created(PAGE, workers_write=True) as memory,
        mmap.mmap(memory.share_fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as page,
    ):
        page[:4] = b"mine"
        assert memory.buffer[:4] == b"mine"


@pytest.mark.parametrize("workers_write", [False, True])
def test_descriptors_are_closed_on_exec(workers_write: bool) -> None:
    with created(PAGE, workers_write=workers_write) as memory:
        assert not os.get_inheritable(memory.share_fd)
        assert not os.get_inheritable(memory._fd)


ATTACHER = """
import mmap, sys
fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
view = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
sys.exit(0 if view[:5] == b"still" else 1)
"""


@pytest.mark.parametrize("workers_write", [False, True])
def test_a_process_that_mapped_it_and_exits_takes_nothing_away_D15(workers_write: bool) -> None:
    with created(PAGE, workers_write=workers_write) as memory:
        memory.buffer[:5] = b"still"
        for _ in range(2):
            attacher = [sys.executable, "-c", ATTACHER, str(memory.share_fd), str(PAGE)]
            assert subprocess.run(attacher, pass_fds=[memory.share_fd], check=False).returncode == 0
        assert os.fstat(memory.share_fd).st_size == PAGE
        assert memory.buffer[:5] == b"still"


@linux
def test_a_page_is_for_its_owner_alone_D05() -> None:
    with created(PAGE, workers_write=True) as memory:
        assert os.fstat(memory.share_fd).st_mode & 0o777 == 0o600


def test_closing_with_a_view_left_is_an_error_and_not_a_crash_D16() -> None:
    memory = shm.create(PAGE)
    view = memoryview(memory.buffer)
    with pytest.raises(BufferError):
        memory.close()
    view.release()
    memory.close()


@pytest.mark.parametrize("nbytes", [0, -PAGE, 1, PAGE + 1])
def test_a_size_is_a_whole_number_of_pages(nbytes: int) -> None:
    with pytest.raises(ValueError, match="whole number of pages"):
        shm.create(nbytes)


def _fails_with(number: int) -> object:
    def fail(*args: object) -> object:
        raise OSError(number, os.strerror(number))

    return fail


@linux
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_is_not_there_is_named_and_nothing_is_left_C07(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _fails_with(number))

    with pytest.raises(OutOfMemory, match=f"no {1 << 30:,} bytes of shared memory left") as caught:
        shm.create(1 << 30)

    assert os.strerror(number) in caught.value.message


@linux
@pytest.mark.parametrize("workers_write", [False, True])
def test_a_mapping_that_is_refused_leaves_nothing(
    workers_write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm.mmap, "mmap", _fails_with(errno.ENOMEM))

    with pytest.raises(OutOfMemory):
        shm.create(PAGE, workers_write=workers_write)


@linux
def test_a_system_that_gives_no_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _fails_with(errno.EMFILE))

    with pytest.raises(OutOfMemory, match="cannot make shared memory: Too many open files"):
        shm.create(PAGE)


# --- macOS, with its two calls faked -----------------------------------------------------------------
class FakeShm:
    """POSIX shared memory of macOS over files: names are short and sizes are set once."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.opened: list[tuple[str, int, int]] = []
        self.unlinked: list[str] = []
        self.sizes: list[int] = []
        self.fail_open_number: int | None = None
        self._ftruncate = os.ftruncate
        monkeypatch.setattr(os, "ftruncate", self.ftruncate)

    def open(self, name: str, flags: int, mode: int) -> int:
        self.opened.append((name, flags, mode))
        if len(self.opened) == self.fail_open_number:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        assert name.startswith("/")
        assert len(name.encode()) <= 30
        return os.open(self.directory / name[1:], flags | os.O_CLOEXEC, mode)

    def unlink(self, name: str) -> None:
        self.unlinked.append(name)
        os.unlink(self.directory / name[1:])

    def ftruncate(self, fd: int, nbytes: int) -> None:
        if os.fstat(fd).st_size:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.sizes.append(nbytes)
        self._ftruncate(fd, nbytes)

    def create(self, nbytes: int, *, workers_write: bool = False) -> shm.SharedMemory:
        return shm._create_darwin(nbytes, workers_write, self.open, self.unlink)

    @property
    def names(self) -> list[str]:
        return os.listdir(self.directory)


@pytest.fixture
def darwin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeShm:
    return FakeShm(tmp_path, monkeypatch)


def test_macos_makes_a_new_short_name_sizes_once_and_unlinks_at_once_D17_D18(
    darwin: FakeShm,
) -> None:
    memory = darwin.create(2 * PAGE)

    (name, flags, mode), (again, read_flags, _) = darwin.opened
    assert flags & os.O_CREAT
    assert flags & os.O_EXCL
    assert mode == 0o600
    assert again == name
    assert len(name.encode()) <= shm.SHM_NAME_MAX_BYTES == 30
    assert read_flags & os.O_ACCMODE == os.O_RDONLY
    assert darwin.sizes == [2 * PAGE]
    assert darwin.unlinked == [name]
    assert darwin.names == []
    memory.close()


def test_macos_workers_get_a_descriptor_that_cannot_be_mapped_writable(darwin: FakeShm) -> None:
    memory = darwin.create(PAGE)
    memory.buffer[0] = 9

    assert fcntl.fcntl(memory.share_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with mmap.mmap(memory.share_fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert view[0] == 9
    with pytest.raises(PermissionError):
        mmap.mmap(memory.share_fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    memory.close()


def test_macos_a_page_is_opened_once_and_writable(darwin: FakeShm) -> None:
    memory = darwin.create(PAGE, workers_write=True)

    assert len(darwin.opened) == 1
    with mmap.mmap(memory.share_fd, PAGE, mmap.MAP_SHARED) as page:
        page[0] = 3
    assert memory.buffer[0] == 3
    memory.close()


def test_macos_two_objects_have_two_names(darwin: FakeShm) -> None:
    for memory in [darwin.create(PAGE), darwin.create(PAGE)]:
        memory.close()

    assert len({name for name, _, _ in darwin.opened}) == 2


def test_macos_a_name_that_is_taken_is_never_used(
    darwin: FakeShm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm.secrets, "token_hex", lambda n: "0" * (2 * n))
    (darwin.directory / "expertd-0000000000000000").write_bytes(b"someone else's")

    with pytest.raises(OutOfMemory, match="File exists"):
        darwin.create(PAGE)

    assert darwin.names == ["expertd-0000000000000000"]


@pytest.mark.parametrize("workers_write", [False, True])
def test_macos_an_object_is_only_ever_mapped_and_with_its_length_D19(
    workers_write: bool, darwin: FakeShm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write() to such an object fails there, and a length of 0 is EINVAL."""
    for call in ("write", "writev", "pwrite", "pwritev", "read", "pread", "preadv", "sendfile"):
        monkeypatch.setattr(os, call, _fails_with(errno.ENXIO))
    lengths: list[int] = []

    class Mapping(mmap.mmap):
        def __new__(cls, fd: int, length: int, *args: int) -> Mapping:
            lengths.append(length)
            return super().__new__(cls, fd, length, *args)

    monkeypatch.setattr(shm.mmap, "mmap", Mapping)

    memory = darwin.create(3 * PAGE, workers_write=workers_write)
    memory.buffer[2 * PAGE] = 1
    memory.close()

    assert lengths == [3 * PAGE]


@pytest.mark.parametrize("failing", ["open", "second open", "ftruncate", "mmap"])
def test_macos_a_failure_leaves_no_name_and_no_descriptor(
    failing: str, darwin: FakeShm, monkeypatch: pytest.MonkeyPatch
) -> None:
    match failing:
        case "open":
            darwin.fail_open_number = 1
        case "second open":
            darwin.fail_open_number = 2
        case "ftruncate":
            monkeypatch.setattr(os, "ftruncate", _fails_with(errno.ENOMEM))
        case "mmap":
            monkeypatch.setattr(shm.mmap, "mmap", _fails_with(errno.ENOMEM))

    with pytest.raises(OutOfMemory):
        darwin.create(PAGE)

    assert darwin.names == []


# --- the tree ----------------------------------------------------------------------------------------
def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_map_leaves_its_length_to_the_system_D19() -> None:
    calls = [
        (path.name, node)
        for top in ("protocol", "daemon", "client")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mmap.mmap"
    ]
    assert {name for name, _ in calls} >= {"shm.py", "arena.py", "platform.py"}

    for name, call in calls:
        assert len(call.args) >= 2, name
        assert ast.unparse(call.args[1]) != "0", name


def test_nothing_uses_multiprocessing_shared_memory_D15() -> None:
    sources = [p for top in ("protocol", "daemon", "client") for p in (ROOT / top).rglob("*.py")]
    assert any(p.name == "shm.py" for p in sources)

    users = [p for p in sources if "multiprocessing.shared_memory" in _imports(p)]

    assert users == []
