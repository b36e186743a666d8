"""The one part of the build that pyproject.toml cannot say: the C extensions.

They are optional: without a compiler the install goes on, and Python does the same.
"""

from setuptools import Extension, setup


def extension(name: str, *sources: str, depends: tuple[str, ...] = ()) -> Extension:
    """An extension of the storage room."""
    return Extension(
        f"rayloader.storage.{name}",
        sources=[f"rayloader/storage/{source}" for source in sources],
        depends=[f"rayloader/storage/{header}" for header in depends],
        extra_compile_args=["-std=gnu11", "-O2", "-pthread", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        py_limited_api=True,
        optional=True,
    )


native = extension("_native", "_native.c", "_engine.c", depends=("_engine.h",))
exchange = extension("_exchange", "_exchange.c")

setup(
    ext_modules=[native, exchange],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
