"""One run, one folder, one writer."""

import errno
import json
import os
import select
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Timer
from typing import NamedTuple

import pytest
from safetensors import SafetensorError
from small import config_of, train

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.base.errors import UserError

NAME = "shapes_qwenimage"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(folders, "WAIT_S", 0.0)


@contextmanager
def child(function):
    """A fork that runs it and then waits for its end; its process id, and the end of a pipe that it keeps open."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os.write(writing, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"!"
        yield pid, reading
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


def take_at_once(first, together):
    together.wait()
    return folders.make_new_folder(first)


def test_runs_that_start_together_get_folders_of_their_own(tmp_path):
    for attempt in range(20):
        together = Barrier(8)
        first = tmp_path / f"{attempt}"
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(take_at_once, [first] * 8, [together] * 8))
        assert {path.name for path in taken} == {first.name, *(f"{first.name}-{number}" for number in range(2, 9))}
        assert folders.numbered_folders(first)[-1] == tmp_path / f"{attempt}-8"


def test_a_running_folder_is_refused_with_its_holder_until_this_one_is_killed(tmp_path):
    folder = tmp_path / f"{NAME}_smoke"
    folder.mkdir()
    (folder / "config.json").write_text(config_of(NAME, tmp_path).to_json())
    with child(lambda: folders.lock(folder)) as (pid, _):
        for resume_from in ("latest", str(folder / "checkpoints" / "epoch_000001")):
            (folder / "checkpoints" / "epoch_000001").mkdir(parents=True, exist_ok=True)
            with pytest.raises(ValueError, match=f"process {pid} on {socket.gethostname()} is writing to {folder}"):
                train(NAME, tmp_path, resume_from=resume_from)
    assert folders.lock(folder) == ""
    folders.release(folder)


def test_a_holder_that_is_killed_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "WAIT_S", 60.0)
    with child(lambda: folders.lock(tmp_path)) as (pid, _):
        Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        assert folders.lock(tmp_path) == ""
    assert folders.lock(tmp_path) == ""  # releases it first
    assert (tmp_path / folders.LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    folders.release(tmp_path)


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    assert f"{tmp_path}: its file system has no locks" in folders.lock(tmp_path)


def test_a_start_that_fails_leaves_nothing_and_what_was_written_stays(tmp_path):
    def fail(folder, files):
        with folders.released_on_error(folder):
            folders.lock(folder)
            for name in files:
                (folder / name).touch()
            raise KeyError

    for files in ([], ["config.json"]):
        folder = folders.make_new_folder(tmp_path / "run")
        with pytest.raises(KeyError):
            fail(folder, files)
        assert folder.exists() == bool(files)
    with child(lambda: folders.lock(folder)):
        pass  # another process may have it now


def test_a_folder_of_another_owner_is_refused(tmp_path):
    folders.check_writable(tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="/proc cannot be written"):  # of the system, whoever runs this
        folders.check_writable(Path("/proc"))


def test_a_full_disk_is_known_in_any_words():
    assert folders.is_disk_full(OSError(errno.ENOSPC, "No space left"))
    assert folders.is_disk_full(SafetensorError("I/O error: Disk quota exceeded (os error 122)"))
    assert not folders.is_disk_full(OSError(errno.EIO, "os error 5"))


def test_a_rank_ends_with_a_torchrun_that_is_killed(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    reading, writing = os.pipe()
    with child(lambda: rank(writing)):
        assert os.read(reading, 1) == b"!"
        os.close(writing)
    ended, _, _ = select.select([reading], [], [], 20)  # and its end of the pipe with it
    assert ended
    os.close(reading)


def rank(writing):
    """Start a process that waits, as torchrun does."""
    if os.fork() == 0:
        distributed.end_with_torchrun()
        os.write(writing, b"!")
        signal.alarm(40)
        signal.pause()


def test_a_digest_is_read_once_and_again_after_the_file_has_changed(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    memory = tmp_path / "digests.json"
    read = []
    real = checksums._computed_digest
    monkeypatch.setattr(checksums, "_computed_digest", lambda *how: read.append(how) or real(*how))
    file.write_bytes(b"1" * 2**20)
    first = checksums.file_digest(file, memory)
    os.link(memory, tmp_path / "backup")
    for _ in range(2):
        assert checksums.file_digest(tmp_path / ".." / tmp_path.name / "weights", memory) == first
    assert len(read) == 1
    before = file.stat()
    file.write_bytes(b"2" * 2**20)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as cp -p does
    changed = checksums.file_digest(file, memory)
    assert changed != first
    assert json.loads((tmp_path / "backup").read_text())[str(file)][-1] == first
    assert memory.stat().st_mode & 0o777 == file.stat().st_mode & 0o777
    entry = json.loads(memory.read_text())[str(file)]
    for damaged in (None, 3, [], ["x"], [*entry[:-1], None], {"a": 1}):
        memory.write_text(json.dumps({str(file): damaged}))
        assert checksums.file_digests({"a": file, "b": file}, memory) == {"a": changed, "b": changed}
    memory.write_text("[1")
    assert checksums.file_digests({"a": file, "b": file}, memory) == {"a": changed, "b": changed}


def endless(path):
    """A file that takes a minute to read, and no room on the disk."""
    with path.open("wb") as file:
        file.truncate(2**36)
    return path


def test_digests_are_computed_beside_other_work_and_a_file_is_read_once_for_all_who_ask(tmp_path, monkeypatch):
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large").write_bytes(b"2" * 2**26)
    files = {name: tmp_path / name for name in ("small", "large")}
    expected = checksums.file_digests(files)
    read = []
    real = checksums._computed_digest
    monkeypatch.setattr(checksums, "_computed_digest", lambda *how: read.append(how) or real(*how))
    with checksums.LaterDigests(files, tmp_path / "digests.json") as later:
        assert checksums.file_digest(files["large"], tmp_path / "digests.json") == expected["large"]
        assert later.result() == expected
    assert len(read) == 2
    assert json.loads((tmp_path / "digests.json").read_text()).keys() == {str(path) for path in files.values()}


def test_digests_that_nobody_waits_for_end_at_once_and_those_that_are_done_are_remembered(tmp_path):
    (tmp_path / "small").write_bytes(b"1")
    files = {"small": tmp_path / "small", "endless": endless(tmp_path / "endless")}
    memory = tmp_path / "digests.json"
    with checksums.LaterDigests(files, memory):
        checksums.file_digest(files["small"], memory)
        memory.unlink()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(checksums.THREADS)]
    assert json.loads(memory.read_text()).keys() == {str(files["small"])}


def test_digests_of_several_processes_are_all_remembered(tmp_path):
    """One writes the memory while the other one still reads."""
    memory = tmp_path / "digests.json"
    (tmp_path / "small").write_bytes(b"1")
    with checksums.LaterDigests({"small": tmp_path / "small"}, memory) as later:
        later.result()
        memory.write_text(json.dumps({"of another": [1, 2, 3, "a"]}))
        (tmp_path / "second").write_bytes(b"2")
        checksums.file_digest(tmp_path / "second", memory)
    assert json.loads(memory.read_text()).keys() == {"of another", str(tmp_path / "small"), str(tmp_path / "second")}


def test_digests_are_those_of_the_files_that_were_named_whatever_becomes_of_the_working_directory(
    tmp_path, monkeypatch
):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    monkeypatch.chdir(tmp_path / "before")
    expected = checksums.file_digest(Path("weights"))
    # Held, so that the threads reach the file after the directory has changed.
    memory = checksums._memory_at(Path("digests.json"))
    stored = memory.stored
    may_begin = threading.Event()
    monkeypatch.setattr(memory, "stored", lambda: may_begin.wait() and stored())
    with checksums.LaterDigests({"weights": Path("weights")}, Path("digests.json")) as later:
        os.chdir(tmp_path / "after")
        may_begin.set()
        assert later.result() == {"weights": expected}
    assert (tmp_path / "before" / "digests.json").exists()


def test_a_file_that_cannot_be_read_is_named_by_one_sentence(tmp_path):
    gone = tmp_path / "gone"
    problem = f"^{gone} cannot be read: No such file or directory$"
    with checksums.LaterDigests({"gone": gone}) as later, pytest.raises(UserError, match=problem):
        later.result()


class Kept(NamedTuple):
    number: int
    share: float = 0.0
    names: dict[str, str] = {}  # noqa: RUF012
    box: list[int] | None = None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"number": 3, "share": 1, "names": {"a": "b"}, "box": [1, 2]}', ""),
        ('{"number": 3}', ""),
        ("[3]", "holds no JSON object"),
        ("{}", "is damaged: .*missing.*number"),
        ('{"number": 3, "other": 1}', "is damaged: .*other"),
        ('{"number": "3"}', "is damaged: number is '3'"),
        ('{"number": true}', "is damaged: number is True"),
        ('{"number": 1e400}', "is damaged: number is inf"),
        (f'{{"number": 1{"0" * 400}}}', "is damaged: number is 1000"),
        ('{"number": 3, "share": null}', "is damaged: share is None"),
        ('{"number": 3, "names": {"a": 1}}', "is damaged: names is {'a': 1}"),
        ('{"number": 3, "names": ["a"]}', r"is damaged: names is \['a'\]"),
        ('{"number": 3, "box": [1, "2"]}', r"is damaged: box is \[1, '2'\]"),
        ('{"number": 3, "names": {"a": "\\ud800"}}', "cannot be read: .*surrogates"),
    ],
)
def test_a_record_has_the_types_that_it_says_or_its_file_is_damaged(text, problem, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(text)
    if problem:
        with pytest.raises(UserError, match=f"{file} {problem}"):
            folders.read_record(Kept, file)
    else:
        assert folders.read_record(Kept, file) == Kept(**json.loads(text))
