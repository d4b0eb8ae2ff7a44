"""Files are whole or not there, a folder has one writer, a full disk is an error."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recbole_pos.errors import StorageError, UsageError
from recbole_pos.experiment import checkpoint
from recbole_pos.files import atomic_write, finish_replacement, replace_folder, write_text


@pytest.fixture
def disk_of():
    """Let no file grow beyond a size from now on: to a process the same as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as unfinished:
        unfinished.write("new")
        raise KeyboardInterrupt
    assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    write_text(file, "new")
    assert file.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("size", [10_000, 3_000_000])  # refused while writing, or while closing
def test_a_full_disk_keeps_the_old_file(tmp_path, disk_of, size) -> None:
    disk_of(4096)
    file = tmp_path / "a.txt"
    write_text(file, "old")
    with pytest.raises(StorageError, match=r"cannot write .*a\.txt: File too large"):
        write_text(file, "x" * size)
    with pytest.raises(StorageError, match=r"a\.txt: File too large"):  # torch hides why
        checkpoint.save(file, {"x": torch.zeros(size // 4)})
    assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_folders_links_and_devices(tmp_path) -> None:
    """A folder is refused, a link stays one, and what is no file is written as it is."""
    for file in (tmp_path / "none" / "a.txt", tmp_path):
        with pytest.raises(UsageError, match="cannot write"):
            write_text(file, "")
        assert not list(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "one"
    with pytest.raises(StorageError, match="cannot write /dev/full: No space left on device"):
        write_text(Path("/dev/full"), "x")


def test_a_private_file_stays_private_and_two_writers_do_not_mix(tmp_path) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")
    file.chmod(0o600)
    with atomic_write(file) as one, atomic_write(file) as two:
        one.write("one")
        two.write("two")
    assert file.read_text() == "one" and file.stat().st_mode & 0o777 == 0o600


def test_a_folder_is_whole_or_leaves_nothing(tmp_path) -> None:
    to = tmp_path / "new"
    with pytest.raises(KeyboardInterrupt), replace_folder(to) as place:
        (place / "part").touch()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with replace_folder(to) as place:
        (place / "part").touch()
    assert [p.name for p in to.iterdir()] == ["part"] and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(StorageError), replace_folder(to) as place:  # a full disk: the old stays
        write_text(place / "other", "x")
        raise StorageError("No space left on device")
    assert [p.name for p in to.iterdir()] == ["part"] and len(list(tmp_path.iterdir())) == 1


def test_the_folder_of_a_killed_process_is_removed(tmp_path) -> None:
    """And that of one that still writes is not."""
    code = """import sys; from pathlib import Path; from recbole_pos.files import *
with replace_folder(Path(sys.argv[1])): print('held', flush=True); input()"""
    command = [sys.executable, "-c", code, tmp_path / "new"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(UsageError), replace_folder(tmp_path / "new"):
        pytest.fail("another writes it")
    other.kill()
    other.wait()
    with replace_folder(tmp_path / "new"):
        assert len(list(tmp_path.iterdir())) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_is_read_between_two_renames(tmp_path, monkeypatch) -> None:
    """The reader finishes what another process is about to do."""
    to, rename = tmp_path / "shop", os.replace
    with replace_folder(to) as place:
        write_text(place / "part", "old")

    def rename_and_read(source, target) -> None:
        rename(source, target)
        if source == to:
            assert not to.exists()
            finish_replacement(to)
            assert (to / "part").read_text() == "new"

    monkeypatch.setattr(os, "replace", rename_and_read)
    with replace_folder(to) as place:
        write_text(place / "part", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["shop"]
    assert [(p.name, p.read_text()) for p in to.iterdir()] == [("part", "new")]
