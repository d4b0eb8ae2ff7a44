"""Files are whole or not there, a folder has one writer, a full disk is an error."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from recbole_pos.errors import StorageError, UsageError
from recbole_pos.files import LOCK, only_writer, remove_unfinished, replacing, whole, write_text


@pytest.fixture
def small_disk():
    """No file may grow beyond 4 kB: to a process the same as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), whole(file) as unfinished:
            unfinished.write("new")
            raise error
    assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    write_text(file, "new")
    assert file.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_two_writers_have_files_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    with whole(file) as one:
        one.write("one")
        with whole(file) as two:
            two.write("two")
        assert file.read_text() == "two"
    assert file.read_text() == "one"


@pytest.mark.parametrize("size", [10_000, 3_000_000])  # refused while writing, or while closing
def test_no_room(tmp_path: Path, small_disk, size: int) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")
    with pytest.raises(StorageError, match=r"cannot write .*a\.txt: File too large"):
        write_text(file, "x" * size)
    assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_library_that_hides_why_it_cannot_write(tmp_path: Path, small_disk) -> None:
    import torch

    from recbole_pos.experiment import checkpoint

    checkpoint.save(tmp_path / "c.pt", {"x": 1})
    with pytest.raises(StorageError, match=r"c\.pt: File too large"):
        checkpoint.save(tmp_path / "c.pt", {"x": torch.zeros(100_000)})
    assert checkpoint.load(tmp_path / "c.pt")["x"] == 1


def test_no_folder_a_folder_and_no_permission(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"folder {tmp_path}/none does not exist"):
        write_text(tmp_path / "none" / "a.txt", "")
    with pytest.raises(UsageError, match="it is a folder"):
        write_text(tmp_path, "")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for text in ("one", "two"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == text


def test_what_is_no_file_is_written_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write /dev/full: No space left on device"):
        write_text(Path("/dev/full"), "x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    write_text(tmp_path / "pipe", "through")
    assert reader.communicate()[0] == b"through"
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def hold(lock: str, folder: Path) -> subprocess.Popen:
    """Start a process that is in the ``with`` block of a function of files.py."""
    code = f"""import sys; from pathlib import Path; from recbole_pos.files import *
with {lock}: print('held', flush=True); input()"""
    command = [sys.executable, "-c", code, folder]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    return other


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    other = hold("only_writer(Path(sys.argv[1]), 'trained')", tmp_path)
    with (
        pytest.raises(UsageError, match=f"^{tmp_path} is being trained by process {other.pid} on"),
        only_writer(tmp_path, "trained"),
    ):
        pytest.fail("two at once")
    other.kill()
    other.wait()
    with only_writer(tmp_path, "trained"):  # the system let go of it
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    with pytest.raises(FileNotFoundError, match="of the body"), only_writer(tmp_path, "trained"):
        raise FileNotFoundError("of the body")


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name in (".c.pt.tmp", ".c.pt.0a1b2c3d.tmp", ".other.tmp", "c.pt"):
        (tmp_path / name).touch()
    remove_unfinished([tmp_path / "c.pt"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.tmp", "c.pt"]


def test_a_folder_is_whole_or_leaves_nothing(tmp_path: Path) -> None:
    to = tmp_path / "above" / "new"
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), replacing(to) as place:
            (place / "part").touch()
            raise error
        assert not list(tmp_path.iterdir())
    with replacing(to) as place:
        (place / "part").touch()
    assert [p.name for p in to.iterdir()] == ["part"] and len(list(to.parent.iterdir())) == 1
    with pytest.raises(UsageError), replacing(tmp_path / ("x" * 300)):
        pytest.fail("no such name")


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """And that of one that still writes is not."""
    other = hold("replacing(Path(sys.argv[1]))", tmp_path / "new")
    with pytest.raises(UsageError), replacing(tmp_path / "new"):
        pytest.fail("another writes it")
    assert len(list(tmp_path.iterdir())) == 1
    other.kill()
    other.wait()
    with replacing(tmp_path / "new"):
        assert len(list(tmp_path.iterdir())) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_names_that_are_too_long(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"), whole(tmp_path / ("x" * 300)):
        pytest.fail("no such name")
