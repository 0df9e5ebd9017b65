"""Downloads FineWeb as GPT-2 tokens: the validation shard and the first N of 103 training shards.

    python data/cached_fineweb10B.py 9      # 9 train + 1 val, 2.0 GB, into data/fineweb10B/
    python data/cached_fineweb10B.py        # all 103 + 1 val, 20.5 GB
    python data/cached_fineweb10B.py 0      # validation only

A shard gets its name only when its size, SHA-256 and header are right. Beside it lies NAME.json: the hub's
etag, size and the file's mtime. While size and mtime stay, a later run reads only the header; else, or with
--verify, it hashes the shard again. When all is there, no network is needed. HF_ENDPOINT and HF_TOKEN count.

Each shard is fetched by a child process of its own, into a folder beside the target: a call that hangs inside
the hub's library can then be killed, and whatever a child leaves behind is one folder to remove. The pinned
huggingface_hub resumes a file only within one call, so a killed run fetches the shards in flight again.
"""

import argparse
import contextlib
import errno
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from check_shards import DataError, atomic_write, number, refuse_missing, shard_length

REPO = "kjj0/fineweb10B-gpt2"
N_TRAIN = 103
MAX_WAIT_S = 900          # longest rate limit that is sat out
MAX_BACKOFF_S = 60
POLL_S = 0.1
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
FATAL_STATUS = {401, 403, 404, 410, 451}
COMMAND = "python data/cached_fineweb10B.py"


def shard_name(index):
    return "fineweb_val_000000.bin" if index == 0 else f"fineweb_train_{index:06d}.bin"


def sha256_of(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ======== Child: the only code that talks to the hub ===================================================

def emit(**event):
    print(json.dumps(event), flush=True)


class Notes(logging.Handler):
    """Passes the library's warnings on: among them how long it waits when the hub limits the rate."""

    def emit(self, record):
        emit(note=record.getMessage())


def failure(error):
    """What the parent has to know about an exception of the library: its root says more than its wrapping."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    responses = [e.response for e in chain if getattr(e, "response", None) is not None]
    status = responses[0].status_code if responses else None
    retry_after = responses[0].headers.get("Retry-After", "") if responses else ""
    offline = any(type(e).__name__ == "OfflineModeIsEnabled" for e in chain)
    text = " ".join(str(chain[-1]).split()).split(" For more information")[0]
    text = re.sub(r"\?[^\s']+", "?...", text)  # signed addresses are long and private
    return dict(failed=f"{type(chain[-1]).__name__}: {text}"[:300], fatal=offline or status in FATAL_STATUS,
                disk=any(isinstance(e, OSError) and e.errno in DISK_ERRORS for e in chain),
                retry_after=float(retry_after) if retry_after.isdigit() else None)


def list_files(repo):
    """One call gives the commit, and size and SHA-256 of every file: the whole plan before the first byte."""
    from huggingface_hub import HfApi
    dataset = HfApi().dataset_info(repo, revision="main", files_metadata=True, timeout=30)
    files = {file.rfilename: [file.lfs.size, file.lfs.sha256] for file in dataset.siblings if file.lfs}
    emit(commit=dataset.sha, files=files)


def fetch_file(repo, name, commit, folder):
    from huggingface_hub import constants, hf_hub_download
    # The library hands on 10 MB at a time; on a slow line that looks like a stall for minutes.
    constants.DOWNLOAD_CHUNK_SIZE = 256 * 1024
    path = hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=folder,
                           cache_dir=f"{folder}/cache")
    with open(path, "rb+") as f:
        os.fsync(f.fileno())  # before the rename: a power cut must not leave a named file without bytes
    emit(fetched=path, sha256=sha256_of(path))


def child(request):
    # stdin ends when the parent dies, however it dies; then this process has no purpose.
    # Trap: sys.stdin would hold a lock that the interpreter wants at exit; read the descriptor.
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    # Plain HTTP: Xet transfers are known to stop for good, and what they gain is little for whole new files.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    logging.getLogger("huggingface_hub").addHandler(Notes())
    try:
        (fetch_file if "name" in request else list_files)(**request)
    except Exception as e:  # the parent decides what every failure means
        emit(**failure(e))


# ======== Shards on disk ===============================================================================

def record_path(path):
    return path.with_name(path.name + ".json")


def read_record(path):
    try:
        record = json.loads(record_path(path).read_text())
        return {key: record[key] for key in ("etag", "size", "mtime_ns")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(path, etag, file):
    """The record of `path`, with size and mtime of `file` (which may still have another name)."""
    record = dict(etag=etag, size=file.stat().st_size, mtime_ns=file.stat().st_mtime_ns)
    with atomic_write(record_path(path)) as f:
        f.write(json.dumps(record).encode() + b"\n")


def shard_state(path, verify):
    """("good" | "missing" | "bad" | "unchecked", why), without the network."""
    if not path.exists():
        return "missing", "not there"
    try:
        shard_length(path)
    except DataError as e:
        if isinstance(e.__cause__, OSError):
            raise  # a folder, or not ours to read: says nothing about the bytes
        return "bad", str(e).splitlines()[0]
    record, status = read_record(path), path.stat()
    if record is None:
        return "unchecked", "there, but without a record of the hub's hash"
    if not verify and (record["size"], record["mtime_ns"]) == (status.st_size, status.st_mtime_ns):
        return "good", ""
    if (digest := sha256_of(path)) != record["etag"]:
        return "bad", f"{path} was changed: its SHA-256 is {digest[:12]}..., want {record['etag'][:12]}..."
    with contextlib.suppress(OSError):  # a read-only folder is hashed again next time
        write_record(path, record["etag"], path)
    return "good", ""


# ======== Parent: plan, watch, retry ===================================================================

class Task:
    """A request to the hub and its tries. `answer` is set when it succeeded, `reason` when it last failed."""

    def __init__(self, request, title, size=0, sha256=""):
        self.request, self.title, self.size, self.sha256 = request, title, size, sha256
        self.folder = Path(request["folder"]) if "folder" in request else None
        self.n_tries, self.start_at, self.process = 0, 0.0, None
        self.answer, self.reason = None, ""

    def n_bytes(self):
        """Bytes in the child's folder. Files come and go while we look."""
        total = 0
        for file in [*self.folder.rglob("*.incomplete"), self.folder / self.title] if self.folder else ():
            with contextlib.suppress(OSError):
                total += file.stat().st_size
        return min(total, self.size)


class Hub:
    """Runs requests in child processes: at most `jobs` at once, each killed when it makes no progress."""

    def __init__(self, options, say, beat):
        self.options, self.say, self.beat = options, say, beat
        self.events, self.running = queue.Queue(), []

    def start(self, task):
        if task.folder:
            task.folder.mkdir()
        task.n_tries += 1
        task.failure, task.last_words = None, ""
        task.seen_bytes, task.alive_at = 0, time.monotonic()
        command = [sys.executable, __file__, "--child", json.dumps(task.request)]
        task.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        self.running.append(task)
        threading.Thread(target=self.listen, args=(task, task.process), daemon=True).start()

    def listen(self, task, process):
        with process.stdout:
            for line in process.stdout:
                self.events.put((task, process, line.decode(errors="replace").strip()))
        self.events.put((task, process, None))

    def stop(self, task):
        task.process.kill()
        task.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            task.process.wait(timeout=10)  # stuck in a dead network disk: it can only write into its folder
        self.running.remove(task)

    def stop_all(self):
        for task in list(self.running):
            self.stop(task)

    def hear(self, task, line):
        """One line from a child: an event, or what a crashing interpreter prints."""
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            task.last_words = line[:300] or task.last_words
            return
        if "note" in event:
            wait = re.search(r"Waiting ([\d.]+)\s?s", event["note"])
            if wait:
                self.say(f"{task.title}: the hub limits the rate, waiting {float(wait[1]):.0f} s")
                task.alive_at = time.monotonic() + float(wait[1])
                if float(wait[1]) > MAX_WAIT_S:
                    task.failure = dict(failed=f"the hub asks to wait {float(wait[1]):,.0f} s", fatal=True)
        elif "failed" in event:
            task.failure = event
        else:
            task.answer, task.failure = event, None
            task.alive_at = time.monotonic()

    def run(self, tasks, accept, show):
        """Runs tasks to success or final failure. If accept(task) raises DataError, that try has failed."""
        waiting = list(tasks)
        while waiting or self.running:
            self.beat()
            ready = [task for task in waiting if task.start_at <= time.monotonic()]
            for task in ready[:max(0, self.options.jobs - len(self.running))]:
                waiting.remove(task)
                self.start(task)
            until = time.monotonic() + POLL_S  # a chattering child must not keep us from the clock below
            with contextlib.suppress(queue.Empty):
                while time.monotonic() < until:
                    task, process, line = self.events.get(timeout=POLL_S)
                    if task not in self.running or process is not task.process:
                        continue
                    if line is not None:
                        self.hear(task, line)
                    if line is None or task.answer or (task.failure or {}).get("fatal"):
                        self.finish(task, accept, waiting)
            for task in list(self.running):
                if (n_bytes := task.n_bytes()) != task.seen_bytes:
                    task.seen_bytes = n_bytes
                    task.alive_at = max(task.alive_at, time.monotonic())
                if time.monotonic() - task.alive_at > self.options.timeout:
                    so_far = f" after {n_bytes:,} of {task.size:,} bytes" if task.folder else ""
                    task.failure = dict(failed=f"no progress for {self.options.timeout:g} s{so_far}")
                    self.finish(task, accept, waiting)
            show(sum(task.seen_bytes for task in self.running))

    def finish(self, task, accept, waiting):
        self.stop(task)
        if task.failure is None and task.answer is None:
            task.failure = dict(failed=f"the child ended with status {task.process.returncode}: "
                                       f"{task.last_words}")
        try:
            if task.failure is None:
                accept(task)
                return
        except DataError as e:  # the hub's own bytes, and yet refused: another try would bring the same
            task.failure = dict(failed=str(e), fatal=task.answer["sha256"] == task.sha256)
        except OSError as e:
            task.failure = dict(failed=f"{type(e).__name__}: {e}", disk=e.errno in DISK_ERRORS)
        finally:
            if task.folder:
                shutil.rmtree(task.folder, ignore_errors=True)
        task.answer, task.reason = None, task.failure["failed"]
        if task.failure.get("disk"):
            raise DataError(f"Writing {task.title} failed: {task.reason}.\n"
                            f"  Fix: free space on the disk of {self.options.out}, or raise the quota or\n"
                            "  the file-size limit; then run this again: whole shards are kept")
        wait = task.failure.get("retry_after") or 0
        if wait > MAX_WAIT_S:
            task.reason = f"the hub asks to wait {wait:,.0f} s"
        elif not task.failure.get("fatal") and task.n_tries < self.options.tries:
            wait = max(wait, min(MAX_BACKOFF_S, self.options.backoff * 2 ** (task.n_tries - 1)))
            self.say(f"{task.title}: {task.reason}; "
                     f"try {task.n_tries + 1} of {self.options.tries} in {wait:g} s")
            task.start_at = time.monotonic() + wait
            waiting.append(task)


@contextlib.contextmanager
def folder_lock(options, say):
    """One download at a time per folder. Yields the folder for partial files, empty, and a sign of life.

    The process that waits watches that folder's mtime, which the holder must renew: waiting has an end.
    """
    from filelock import FileLock, Timeout  # huggingface_hub requires it
    incoming, path = options.out / ".incoming", options.out / ".download.lock"
    lock, last, since = FileLock(path), None, time.monotonic()
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            if last is None:
                say(f"Another download is at work in {options.out}; waiting for it")
                last = 0
        with contextlib.suppress(OSError):
            if (renewed := incoming.stat().st_mtime_ns) != last:
                last, since = renewed, time.monotonic()
        if time.monotonic() - since > options.timeout:
            raise DataError(f"Another process holds {path} and has done nothing for {options.timeout:g} s.\n"
                            "  Fix: end that process, then run this again")
        time.sleep(POLL_S)
    try:
        shutil.rmtree(incoming, ignore_errors=True)  # partial shards of a killed run
        incoming.mkdir(exist_ok=True)

        def beat():
            with contextlib.suppress(OSError):
                os.utime(incoming)

        yield incoming, beat
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
        lock.release()


def clear_partials(options):
    """Removes what a killed run left, if that needs no waiting; a folder that is read-only may stay so."""
    from filelock import FileLock
    if (options.out / ".incoming").exists():
        with contextlib.suppress(OSError), FileLock(options.out / ".download.lock", timeout=0):
            shutil.rmtree(options.out / ".incoming", ignore_errors=True)


def plan(hub, options, wanted):
    """Asks the hub for the commit, and for size and SHA-256 of the wanted files."""
    task = Task(dict(repo=options.repo), f"the file list of {options.repo}")
    hub.run([task], accept=lambda task: None, show=lambda n_bytes: None)
    if task.answer is None:
        raise DataError(
            f"The hub did not give the file list of {options.repo}: {task.reason}.\n"
            f"  Missing: {', '.join(f'{path.name} ({why})' for path, why in wanted.items())}\n"
            "  Fix: check the network, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, then run this again")
    files = task.answer["files"]
    if absent := [path.name for path in wanted if path.name not in files]:
        raise DataError(f"{options.repo} has no {', '.join(absent)} with a SHA-256.\n"
                        f"  It has {len(files)}: {', '.join(sorted(files)[:5])} ...\n"
                        "  Fix: ask for shards that exist, or check HF_ENDPOINT")
    return task.answer["commit"], files


def adopt(path, sha256, say):
    """Gives a shard its missing record, if it is the hub's; else moves it away: it may be own work."""
    if sha256_of(path) == sha256:
        write_record(path, sha256, path)
        return True
    aside = path.with_name(path.name + ".not-from-hub")
    os.replace(path, aside)
    say(f"{path} is not the hub's file; moved to {aside.name}")
    return False


def download(options, paths, say, bar_at):
    """Fetches what is not good among `paths`. Returns {path: reason} of what is still missing."""
    states = {path: shard_state(path, options.verify) for path in paths}
    if all(state == "good" for state, _ in states.values()):
        clear_partials(options)
        return {}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as e:
        raise DataError(f"{options.out} cannot be written: {e.strerror}.\n"
                        "  Fix: choose another folder with --out, or correct its permissions") from e
    with folder_lock(options, say) as (incoming, beat):
        hub = Hub(options, say, beat)
        try:
            for path in paths:  # the process that was waited for may have fetched some
                beat()
                if states[path][0] != "good":
                    states[path] = shard_state(path, options.verify)
                if states[path][0] == "bad":
                    say(f"{states[path][1]}; fetching it again")
                    path.unlink()
            wanted = {path: why for path, (state, why) in states.items() if state != "good"}
            if not wanted:
                return {}
            commit, files = plan(hub, options, wanted)
            tasks = {}
            for path in wanted:
                beat()
                size, sha256 = files[path.name]
                if states[path][0] == "unchecked" and adopt(path, sha256, say):
                    continue
                folder = str(incoming / path.stem)
                request = dict(repo=options.repo, name=path.name, commit=commit, folder=folder)
                tasks[path] = Task(request, path.name, size, sha256)
            check_space(options, tasks.values())
            fetch(hub, tasks, bar_at)
            return {path: task.reason for path, task in tasks.items() if task.answer is None}
        finally:
            hub.stop_all()


def check_space(options, tasks):
    sizes = [task.size for task in tasks]
    n_free = shutil.disk_usage(options.out).free
    if sum(sizes) > n_free:
        n_fit = sum(sum(sizes[:i + 1]) <= n_free for i in range(len(sizes)))
        raise DataError(
            f"{options.out} has {n_free:,} bytes free, want {sum(sizes):,} for {len(sizes)} shards.\n"
            f"  Fix: free space, choose another disk with --out, or ask for fewer: {n_fit} more fit")


def fetch(hub, tasks, bar_at):
    path_of = {task.title: path for path, task in tasks.items()}
    done_bytes = 0
    with bar_at(sum(task.size for task in tasks.values())) as bar:

        def accept(task):
            nonlocal done_bytes
            path, file = path_of[task.title], Path(task.answer["fetched"])
            size, sha256 = file.stat().st_size, task.answer["sha256"]
            if (size, sha256) != (task.size, task.sha256):
                raise DataError(f"wrong bytes: {size:,} with SHA-256 {sha256[:12]}..., "
                                f"want {task.size:,} with {task.sha256[:12]}...")
            try:
                shard_length(file)
            except DataError as e:
                raise DataError(f"the hub's file is no shard: {str(e).splitlines()[0]}") from e
            # The record first: a run killed between the two finds a shard with its record, or none of both.
            write_record(path, task.sha256, file)
            os.replace(file, path)
            done_bytes += task.size

        def show(n_bytes):
            bar.update(done_bytes + n_bytes - bar.n)  # a failed try takes its bytes back

        hub.run(tasks.values(), accept, show)


# ======== Command ======================================================================================

def parse_options(argv):
    parser = argparse.ArgumentParser(description="Download FineWeb as GPT-2 tokens, checked by SHA-256.")
    parser.add_argument("n_train", metavar="N", nargs="?", default=N_TRAIN,
                        type=number(int, 0, N_TRAIN, f"a number of training shards from 0 to {N_TRAIN}"),
                        help=f"training shards to fetch, 0 to {N_TRAIN}; 0 = validation only; default: all")
    parser.add_argument("--jobs", type=number(int, 1, 32, "1 to 32"), default=4, help="downloads at once (4)")
    parser.add_argument("--timeout", type=number(float, 0.1, 86400, "seconds from 0.1 to 86400"),
                        default=120.0, metavar="S",
                        help="seconds without progress before a download is tried again (120)")
    parser.add_argument("--tries", type=number(int, 1, 100, "1 to 100"), default=5,
                        help="tries per shard (5)")
    parser.add_argument("--backoff", type=number(float, 0, 60, "seconds from 0 to 60"), default=1.0,
                        metavar="S", help="wait before the second try; doubles with each (1)")
    parser.add_argument("--verify", action="store_true", help="hash every shard again")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="target folder (fineweb10B beside this script)")
    parser.add_argument("--repo", default=REPO, help=f"dataset on the hub, with the same file names ({REPO})")
    return parser.parse_args(argv)


def main(argv):
    if argv[:1] == ["--child"]:
        child(json.loads(argv[1]))
        return 0
    options = parse_options(argv)
    try:
        refuse_missing(["filelock", "huggingface_hub", "tqdm"], "python -m pip install -r requirements.txt")
    except DataError as e:
        print(e, file=sys.stderr)
        return 1
    from tqdm import tqdm
    title = f"{options.n_train} train + 1 val"

    def bar_at(total):
        interval = 0.2 if sys.stderr.isatty() else 10  # a log file needs no animation
        return tqdm(total=total, desc=title, unit="B", unit_scale=True, mininterval=interval)

    def say(text):
        tqdm.write(text, file=sys.stderr)

    # SIGTERM (a scheduler, a container stop) cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    paths = [options.out / shard_name(index) for index in range(options.n_train + 1)]
    try:
        missing = download(options, paths, say, bar_at)
    except DataError as e:
        print(e, file=sys.stderr)
        return 1
    except OSError as e:
        print(f"{type(e).__name__}: {e}.\n  Fix: check the disk and the permissions of {options.out}",
              file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Stopped; whole shards are kept.\n  Fix: run {COMMAND} again for the rest", file=sys.stderr)
        return 130
    if missing:
        print(f"{len(missing)} of {len(paths)} shards are missing in {options.out}:", file=sys.stderr)
        for path, reason in missing.items():
            print(f"  {path.name}: {reason}", file=sys.stderr)
        print("  Fix: run this again (whole shards are kept); if it persists, check the network,\n"
              "  HF_ENDPOINT and HF_TOKEN, or try --jobs 1", file=sys.stderr)
        return 1
    n_tokens = [shard_length(path) for path in paths]
    print(f"{title} in {options.out}: {sum(n_tokens):,} tokens, all checked")
    if options.n_train == N_TRAIN:
        print(f"{paths[-1].name} is the last shard, {n_tokens[-1]:,} tokens: shorter than the others, normal")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
