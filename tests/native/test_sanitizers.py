"""The C engine, driven at random by stress.c, under the sanitizers of the C compiler."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "rayloader" / "storage" / "_engine.c"
COMPILER = os.environ.get("CC", "cc")
COMMON = ["-std=gnu11", "-g", "-O1", "-pthread", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
WRAPPED = ["-Wl,--wrap=pread64", "-Wl,--wrap=openat64", "-Wl,--wrap=pthread_create"]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler")
@pytest.mark.parametrize("kind", ["thread", "address,undefined"])
def test_the_engine_has_no_race_no_leak_and_no_undefined_behaviour(tmp_path, kind):
    program = tmp_path / "stress"
    sanitizer = [f"-fsanitize={kind}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    sources = [str(HERE / "stress.c"), str(ENGINE)]
    built = subprocess.run(
        [COMPILER, *COMMON, *sanitizer, *sources, *WRAPPED, "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr or "unsupported" in built.stderr:
        pytest.skip("the compiler has no such sanitizer")
    assert built.returncode == 0, built.stderr
    seed = os.getpid() % 100_000
    ran = subprocess.run(
        [str(program), str(tmp_path), "2", str(seed)], capture_output=True, text=True, timeout=50
    )
    assert ran.returncode == 0, f"seed {seed}\n{ran.stderr}"
    assert "engines" in ran.stdout
