"""The one part of the build that pyproject.toml cannot say: the C extension.

It is optional: without a compiler the install goes on, and the Python engine serves.
"""

from setuptools import Extension, setup

native = Extension(
    "rayloader.storage._native",
    sources=["rayloader/storage/_native.c", "rayloader/storage/_engine.c"],
    depends=["rayloader/storage/_engine.h"],
    extra_compile_args=["-std=gnu11", "-O2", "-pthread", "-Wall", "-Wextra"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[native],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
