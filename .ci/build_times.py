"""Print the CPU seconds that a build takes, by compiled file: python .ci/build_times.py

The build is made in a temporary copy of the files that git knows, with the compiler that CC names. The environment has
what pyproject.toml requires for a build.
"""

import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

#: Files that take less than this are summed up in one line.
SMALL_SECONDS = 2.0


def seconds_of(command: list[str], **settings) -> tuple[float, int]:
    """Run a command, and return the CPU seconds of it and of its children, and its exit status."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    status = subprocess.run(command, **settings).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, status


def compile_one(log: str, command: list[str]) -> int:
    """Run the compiler, and append its CPU seconds and the compiled file to the log."""
    seconds, status = seconds_of(command)
    source = next((Path(word).name for word in command if word.endswith(".c")), "linking")
    lanes = next((word[-2:].lstrip("=") for word in command if re.fullmatch(r"-DAG_KERNEL_LANES=[1-9]\d*", word)), "")
    with open(log, "a") as file:
        file.write(f"{seconds}\t{source}{lanes and f', {lanes} lanes'}\n")
    return status


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).parents[1]
        names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--null", "-T", "-", "-cf", f"{folder}/files.tar"], cwd=root, input=names, check=True)
        subprocess.run(["tar", "-xf", "files.tar"], cwd=folder, check=True)
        log = Path(folder, "seconds.txt")
        compiler = shlex.join([sys.executable, str(Path(__file__).resolve()), str(log)])
        environment = os.environ | {"CC": f"{compiler} {os.environ.get('CC', 'gcc')}"}
        whole, status = seconds_of(
            [sys.executable, "setup.py", "build_ext"], cwd=folder, env=environment, stdout=subprocess.DEVNULL
        )
        if status:
            raise SystemExit(status)
        lines = [line.split("\t") for line in log.read_text().splitlines()]
        size = sum(path.stat().st_size for path in Path(folder, "build").glob("lib.*/**/*.so"))

    seconds: dict[str, float] = {}
    for count, name in lines:
        seconds[name] = seconds.get(name, 0.0) + float(count)
    small = [name for name, count in seconds.items() if count < SMALL_SECONDS]
    rows = {name: count for name, count in seconds.items() if count >= SMALL_SECONDS}
    rows[f"{len(small)} others"] = sum(seconds[name] for name in small)
    rows["Cython, setup.py"] = whole - sum(seconds.values())
    print("| compiled file | CPU seconds | of all |\n|---|---:|---:|")
    for name, count in sorted(rows.items(), key=lambda row: -row[1]):
        print(f"| {name} | {count:.1f} | {count / whole:.0%} |")
    print(f"| all | {whole:.1f} | |\n\nmodules: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(compile_one(sys.argv[1], sys.argv[2:]))
    main()
