"""Disks that are full, become full, or take no writes: one sentence says so, and with room again the run goes on."""

import subprocess
from functools import cache, partial
from pathlib import Path

from faults_commands import Command, Ended, judge
from faults_kills import MOMENTS, wait_until
from faults_runs import TRAINED, Bench, differences, only_folder
from faults_tries import Dice, Try, Verdict

FULL = ("No space left", "no space left", "no room", "disk", "File too large", "too large")
LARGE_MIB = 256


def make(bench: Bench, seed: int, number: int) -> Try:
    """One kind of disk, one algorithm."""
    dice = Dice(seed, "disks", number)
    cases = MOUNTED if can_mount(bench.folder) else ()
    case = (*cases, *UNMOUNTED)[number % (len(cases) + len(UNMOUNTED))]
    algorithm = dice.pick(TRAINED)
    bench.reference(algorithm)
    return Try("disks", number, f"{case.__name__}, {algorithm}", partial(case, bench, algorithm, dice))


@cache
def can_mount(folder: Path) -> bool:
    """Whether this user may mount a tmpfs."""
    place = folder / "mounted"
    place.mkdir(exist_ok=True)
    return mount(place, 1024) and subprocess.run(["umount", place], check=False).returncode == 0


def mount(place: Path, kib: int, *, options: str = "") -> bool:
    """A file system of its own; with options, one that is mounted already."""
    words = ["mount", "-t", "tmpfs", "-o", f"{options}size={kib}k", "tmpfs", str(place)]
    return subprocess.run(words, check=False, stderr=subprocess.DEVNULL).returncode == 0


def size_of(folder: Path) -> int:
    """KiB of a run folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024


def full(bench: Bench, algorithm: str, dice: Dice, folder: Path) -> Verdict:
    """Room for a part of the run; then for all of it."""
    disk, whole = folder / "disk", bench.reference(algorithm)
    disk.mkdir()
    mount(disk, max(4, int(1.1 * size_of(whole) * dice.share())))
    words = bench.words(algorithm, disk / "runs", resume_from="latest")
    first = Command(words, folder).wait()
    verdict = judge(first, FULL, early=False)
    mount(disk, LARGE_MIB * 1024, options="remount,")
    return goes_on(Command(words, folder, "last").wait(), disk / "runs", whole, verdict)


def goes_on(ended: Ended, output_dir: Path, whole: Path, before: Verdict) -> Verdict:
    """Whether it ended, resumed, as the unbroken run, and whether what it said before was right."""
    if ended.status != 0:
        return Verdict(False, f"with room again it ended with {ended.status}: {ended.last[-300:]}")
    if differ := differences(only_folder(output_dir), whole):
        return Verdict(False, f"silent: {differ}; before: {before.why}")
    return Verdict(before.good, f"{before.why}; then equal")


def becomes_read_only(bench: Bench, algorithm: str, dice: Dice, folder: Path) -> Verdict:
    """The disk takes no writes from some moment on; later it does."""
    disk = folder / "disk"
    disk.mkdir()
    mount(disk, LARGE_MIB * 1024)
    words = bench.words(algorithm, disk / "runs", resume_from="latest")
    command = Command(words, folder)
    wait_until(MOMENTS[dice.pick(("line", "any", "save"))], disk / "runs", [command], dice)
    mount(disk, LARGE_MIB * 1024, options="remount,ro,")
    first = command.wait()
    mount(disk, LARGE_MIB * 1024, options="remount,rw,")
    verdict = judge(first, ("Read-only", "read-only", "disk", "write"), early=False)
    return goes_on(Command(words, folder, "last").wait(), disk / "runs", bench.reference(algorithm), verdict)


def is_read_only(bench: Bench, algorithm: str, dice: Dice, folder: Path) -> Verdict:
    """From the beginning: refused before weights are loaded."""
    disk = folder / "disk"
    disk.mkdir()
    mount(disk, 1024, options="ro,")
    return refused(Command(bench.words(algorithm, disk / "runs"), folder).wait(), str(disk))


def is_no_folder(bench: Bench, algorithm: str, dice: Dice, folder: Path) -> Verdict:
    """A file, a link onto itself, a link to nowhere, /proc, a name that is too long."""
    (folder / "file").write_text("")
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("missing/folder")
    place = dice.pick(("file", "file/runs", "loop", "loop/runs", "/proc/runs", "/dev/null", "n" * 300, "nowhere/runs"))
    ended = Command(bench.words(algorithm, place), folder).wait()
    if place == "nowhere/runs" and ended.status == 0:
        return Verdict(True, "made what the link names")
    return refused(ended, place)


def refused(ended: Ended, place: str) -> Verdict:
    """One sentence that names the place or the setting."""
    if ended.status == 0:
        return Verdict(False, "ran to its end")
    return judge(ended, (place, "output_dir"))


def file_limit(bench: Bench, algorithm: str, dice: Dice, folder: Path) -> Verdict:
    """No file may grow beyond some size."""
    words = bench.words(algorithm, folder / "runs", resume_from="latest")
    whole = bench.reference(algorithm)
    largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    verdict = judge(Command(words, folder, file_bytes=int(500 + largest * dice.share())).wait(), FULL, early=False)
    return goes_on(Command(words, folder, "last").wait(), folder / "runs", whole, verdict)


def full_device(bench: Bench, algorithm: str, dice: Dice, folder: Path) -> Verdict:
    """metrics.jsonl cannot grow: it is a link to /dev/full."""
    words = bench.words(algorithm, folder / "runs", resume_from="latest")
    Command([*words, "--config.num_epochs=1"], folder, "before").wait()
    run = only_folder(folder / "runs")
    (run / "metrics.jsonl").rename(folder / "metrics.jsonl")
    (run / "metrics.jsonl").symlink_to("/dev/full")
    verdict = judge(Command(words, folder).wait(), (*FULL, "metrics.jsonl"), early=False)
    (run / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").rename(run / "metrics.jsonl")
    return goes_on(Command(words, folder, "last").wait(), folder / "runs", bench.reference(algorithm), verdict)


MOUNTED = (full, full, becomes_read_only, is_read_only)
UNMOUNTED = (is_no_folder, file_limit)
