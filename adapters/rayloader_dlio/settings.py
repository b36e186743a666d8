"""What DLIO's arguments, the workload file and the environment ask of rayloader.

Pure functions of DLIO's arguments and a mapping: nothing here reads a file or ``os.environ``.
Whatever cannot be done as DLIO's own loader would do it is an ``OptionError`` that names it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from rayloader import Catalog, CatalogError, OptionError, Options

SECTION = "rayloader"
"""Key below ``storage.storage_options`` in a workload file whose values are options."""
PREFIX = "RAYLOADER_"
"""Of options in the environment, which win over the workload file's."""
NOT_OPTIONS = (
    "RAYLOADER_DEBUG", "RAYLOADER_RUN_ID", "RAYLOADER_DLIO", "RAYLOADER_DLIO_PYTHON",
)  # fmt: skip
"""Variables that begin like options and are none."""

OF_DLIO = {
    "batch_size": "reader.batch_size",
    "shuffle": "reader.file_shuffle and reader.sample_shuffle",
    "seed": "reader.seed",
    "uneven": "how DLIO divides files by ranks",
    "drop_last": "DLIO's loaders, which always do",
    "ordered": "DLIO's order",
    "on_error": "DLIO, which ends at a file that it cannot read",
    "skip_budget_files": "DLIO, which skips nothing",
    "skip_budget_share": "DLIO, which skips nothing",
}
"""Options that are not the user's here, and what decides them."""

WHOLE_FILES = ("jpeg", "png", "npy", "npz", "csv")
"""Formats that every DLIO reads as whole files."""
IN_PARTS = {
    "tfrecord": "as a stream of records",
    "parquet": "by row group",
    "hdf5_opt": "by dataset",
    "indexed_binary": "by offset",
    "mmap_indexed_binary": "by offset",
    "synthetic": "not at all",
}
"""Formats that DLIO reads otherwise: reading whole files would be another workload."""

GROWTH = {"csv": 4.0}
"""Bytes of a file per byte of DLIO's record_length, where it is written as text."""
MARGIN = 1.02
FILE_OVERHEAD_BYTES = 8 << 10
"""Headers of a file beside its records, and rounding [bytes]."""
CREDENTIALS = {
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
}
"""DLIO's names of them in storage_options, and rayloader's in the environment."""
LIBRARIES = ("s3dlio", "s3torchconnector", "minio")
"""With which DLIO itself would read objects; here they say only how it names them, and spells."""
NAMED_BY_KEY = "s3dlio"
"""The one that takes a URI apart whatever ``use_full_object_uri`` says."""
RANGES_BYTES = Options().ranges_bytes
"""Of memory_bytes, what is not for batches [bytes]."""
DEVIATIONS = 6.0
"""Standard deviations above the mean that the largest batch is reckoned with."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b|)", re.IGNORECASE)
_SCHEME = re.compile(r"(?:.*/)?(s3|az|gs|direct|file):/+(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the ranks of one DLIO run read.

    Attributes:
        options: of the rank's reader.
        told: where the user's options came from, by name: ``RAYLOADER_CONCURRENCY``, or the
            workload file.
        storage: ``file`` or a URI scheme.
        dlio_read_ahead: batches that DLIO's own loader would hold ahead [batches].
        largest_batch_bytes: that any batch can have, by DLIO's own figures [bytes].
        credentials: of the object storage, where the workload file has them; by the variables that
            rayloader takes them from.
    """

    options: Options
    told: dict[str, str]
    storage: str
    dlio_read_ahead: int
    largest_batch_bytes: int
    credentials: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def deeper(self) -> bool:
        """Whether more is read ahead than DLIO's own loader would."""
        ahead = self.options.read_ahead_batches
        return ahead is None or ahead > self.dlio_read_ahead


def settings(args: Any, environ: Mapping[str, str]) -> Settings:
    """What ``args``, DLIO's ConfigArguments, and the environment ask for.

    Raises:
        OptionError: an argument that cannot be served, or an unknown option; it is named.
    """
    require_format(args)
    require_loader(args)
    storage, direct = _storage(args)
    given, told = _given(args, environ)
    ahead = read_ahead(args)
    defaults: dict[str, Any] = {
        "batch_size": int(args.batch_size),
        "shuffle": False,
        "drop_last": True,
        "read_ahead_batches": ahead,
        "direct": direct,
        "ray": "private",
    }
    credentials: dict[str, str] = {}
    if storage != "file":
        defaults |= _of_objects(args, environ)
        credentials = {
            variable: str(value)
            for name, variable in CREDENTIALS.items()
            if (value := _storage_options(args).get(name))
        }
    largest = largest_batch_bytes(args)
    if given.get("deliver", True):
        # The trainer gets a batch larger than half of the memory as a copy: leave room for two.
        defaults["memory_bytes"] = max(Options.memory_bytes, 2 * largest + RANGES_BYTES)
    options = Options.of({**defaults, **given})
    return Settings(options, told, storage, ahead, largest, credentials)


def require_format(args: Any) -> None:
    """The format must be one of which DLIO reads whole files.

    Raises:
        OptionError: it is another.
    """
    name = _word(args.format)
    if name in WHOLE_FILES:
        return
    if name == "hdf5":
        if int(args.num_samples_per_file) > 1 and not is_fork(args):
            raise OptionError(
                "dataset.format: hdf5 with num_samples_per_file > 1 is not served: this DLIO reads "
                "single records of a file, and rayloader whole files, which is another workload"
            )
        return
    how = IN_PARTS.get(name, "in a way that rayloader does not know")
    raise OptionError(
        f"dataset.format: {name} is not served: DLIO reads it {how}, and rayloader whole files, "
        f"which is another workload; served are {', '.join(WHOLE_FILES)} and hdf5"
    )


def require_loader(args: Any) -> None:
    """Framework, sampler and reader must leave the reading to us.

    Raises:
        OptionError: they do not.
    """
    for name, wanted in (("framework", "pytorch"), ("data_loader", "pytorch")):
        found = _word(getattr(args, name))
        if found != wanted:
            raise OptionError(f"{name}: {found} is not served: rayloader_dlio needs {wanted}")
    sampler = _word(args.data_loader_sampler)
    if sampler not in ("iterative", "index"):
        raise OptionError(f"reader.data_loader_sampler: {sampler}: must be iterative or index")
    if getattr(args, "reader_classname", None) or getattr(args, "reader_class", None):
        raise OptionError("reader.reader_classname is not served: rayloader reads the files")
    if _preprocesses(args):
        raise OptionError(
            "reader.preprocess_time is not served: DLIO's readers sleep so long per sample in "
            "their workers, and rayloader's do not"
        )
    if _word(getattr(args, "read_type", "on_demand")) != "on_demand":
        raise OptionError("reader.read_type: memory is not served: every epoch reads its files")
    if _word(getattr(args, "file_access", "multi")) not in ("multi", "posix"):
        raise OptionError(
            f"reader.file_access: {_word(args.file_access)} is not served: only multi"
        )


def read_ahead(args: Any) -> int:
    """Batches that DLIO's own torch loader holds ahead [batches].

    ``prefetch_size`` rounded up to a multiple of the workers, two for each where it is 0, and
    none without workers.
    """
    workers, prefetch = int(args.read_threads), int(args.prefetch_size or 0)
    if workers < 1:
        return 0
    return (math.ceil(prefetch / workers) or 2) * workers


def largest_batch_bytes(args: Any) -> int:
    """The most that one batch can take, train or eval, by DLIO's own figures [bytes].

    DLIO draws the side of a square record from a normal distribution, so sizes have mean
    m² + s² and variance 4 m² s² + 2 s⁴; of a batch's sum this is its mean and six deviations.
    """
    side, spread = _side_of_record(args)
    mean = side**2 + spread**2
    deviation = math.sqrt(4 * side**2 * spread**2 + 2 * spread**4)
    samples = int(args.num_samples_per_file)
    growth = MARGIN * GROWTH.get(_word(args.format), 1.0)
    sizes = [int(args.batch_size)]
    if args.do_eval:
        sizes.append(int(args.batch_size_eval))
    largest = 0.0
    for size in sizes:
        files = max(1, size // samples)
        records = files * samples
        total = records * mean + DEVIATIONS * math.sqrt(records) * deviation
        largest = max(largest, growth * total + files * FILE_OVERHEAD_BYTES)
    return int(largest)


def record_bytes(args: Any) -> int:
    """A record's size as DLIO reckons with it [bytes]."""
    return round(_side_of_record(args)[0] ** 2)


def _side_of_record(args: Any) -> tuple[float, float]:
    """Mean and deviation of the side of a square record, as DLIO draws it [sqrt(bytes)]."""
    length = max(int(args.record_length), 1)
    side, drawn = math.sqrt(length), getattr(args, "dimension", 0)
    if isinstance(drawn, int) and drawn > side:
        side = drawn  # DLIO 3 has overwritten record_length where there are no record_dims
    return side, float(args.record_length_stdev or 0) / 2 / side


def has_plain_paths(args: Any) -> bool:
    """Whether DLIO's lists hold paths, and nothing else."""
    return bool(_word(args.storage_type) == "local_fs")


def located(path: str, args: Any, storage: str) -> str:
    """A file as rayloader names it: a path, or a URI.

    DLIO's own loaders make ``/cwd/direct:/data/x`` of ``direct:///data/x`` and hand out bare keys
    of a bucket; both are put right here.
    """
    if storage == "file":
        if has_plain_paths(args):
            return path
        match = _SCHEME.fullmatch(path)
        return "/" + match.group(2) if match and match.group(1) in ("direct", "file") else path
    match = _SCHEME.fullmatch(path)
    if match:
        uri = f"{match.group(1)}://{match.group(2)}"
    else:
        bucket = str(args.storage_root).removeprefix(f"{storage}://").strip("/")
        folder = str(args.data_folder).strip("/")
        key = path[path.index(folder) :] if folder in path else path.lstrip("/")
        uri = f"{storage}://{bucket}/{key}"
    if not has_uris_for_keys(args):
        return uri
    return f"{storage}://{uri.split('/')[2]}/{uri}"


def has_uris_for_keys(args: Any) -> bool:
    """Whether DLIO stores an object by its whole URI: ``s3://bucket/key`` is a key of the bucket.

    argonne-lcf's DLIO 3 always does, mlcommons' fork where it is told to.
    """
    if is_2_0(args):
        return False
    if not is_fork(args):
        return True
    options = _storage_options(args)
    asked = str(options.get("use_full_object_uri", "")).lower() in ("true", "1", "yes")
    return asked and options.get("storage_library") != NAMED_BY_KEY


# Storage


def _storage(args: Any) -> tuple[str, bool]:
    """The scheme of what is read, and whether it is read with O_DIRECT.

    Raises:
        OptionError: a storage that is not served.
    """
    kind, options = _word(args.storage_type), _storage_options(args)
    scheme = str(options.get("uri_scheme", "")).rstrip(":/")
    library = str(options.get("storage_library", ""))
    direct = bool(getattr(args, "odirect", False)) or "direct" in (scheme, library)
    if kind == "local_fs":
        return "file", direct
    if kind == "direct_fs":
        return "file", True
    if kind == "s3":
        scheme = scheme or "s3"
        if scheme in ("file", "direct"):
            return "file", direct
        if direct:
            raise OptionError(f"reader.odirect has no meaning with storage_type: s3 ({scheme})")
        require_scheme(scheme)
        require_library(options)
        return scheme, False
    raise OptionError(
        f"storage.storage_type: {kind} is not served: only local_fs, direct_fs and s3"
        + (" (AIStore also speaks S3: storage_type: s3)" if kind == "aistore" else "")
    )


def require_scheme(scheme: str) -> None:
    """The installed rayloader must read objects of this scheme.

    Raises:
        OptionError: it does not.
    """
    try:
        Catalog.of_files([f"{scheme}://bucket/key"])
    except CatalogError as error:
        raise OptionError(f"storage.storage_type: s3 ({scheme}) is not served: {error}") from error


def require_library(options: Mapping[str, Any]) -> None:
    """Of what DLIO's libraries are told, all that decides what is read must have been heard.

    Raises:
        OptionError: an unknown library, or one that finds its credentials elsewhere.
    """
    library = options.get("storage_library")
    if library is not None and library not in LIBRARIES:
        raise OptionError(
            f"storage.storage_library: {library} is not served: only {', '.join(LIBRARIES)}"
        )
    if options.get("s3_profile"):
        raise OptionError(
            "storage_options.s3_profile is not served: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or access_key_id and secret_access_key"
        )


def _of_objects(args: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    """What DLIO's own storage would ask; what is left out is what the environment says."""
    options, found = _storage_options(args), {}
    if endpoint := _endpoint(args, environ):
        found["endpoint_url"] = endpoint
    if options.get("region"):
        found["region"] = str(options["region"])
    window = options.get("prefetch_window")
    if window is not None:
        found["concurrency"] = _number("storage_options.prefetch_window", window)
    return found


def _endpoint(args: Any, environ: Mapping[str, str]) -> str:
    """Where requests go; empty: the workload file does not say.

    mlcommons' fork deals several endpoints out to its ranks, whichever library it uses.
    """
    several = [one.strip() for one in environ.get("S3_ENDPOINT_URIS", "").split(",")]
    several = [one for one in several if one]
    if is_fork(args) and len(several) > 1:
        return several[int(args.my_rank) % len(several)]
    options = _storage_options(args)
    endpoint = str(options.get("endpoint_url") or "")
    if endpoint and "://" not in endpoint and options.get("storage_library") == "minio":
        endpoint = f"http://{endpoint}"  # as that library's users may leave it out
    return endpoint


def _storage_options(args: Any) -> Mapping[str, Any]:
    return getattr(args, "storage_options", None) or {}


# Options


def _given(args: Any, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The user's options, and where each came from.

    Raises:
        OptionError: unknown, of a wrong type, or DLIO's to decide.
    """
    section = _storage_options(args).get(SECTION) or {}
    if not isinstance(section, Mapping):
        raise OptionError(
            f"storage.storage_options.{SECTION}={section!r}: must be a section of options"
        )
    given: dict[str, Any] = {}
    told: dict[str, str] = {}
    for name, value in section.items():
        given[str(name)], told[str(name)] = value, f"storage_options.{SECTION}.{name}"
    for name, text in environ.items():
        if name.startswith(PREFIX) and name not in NOT_OPTIONS:
            option = name.removeprefix(PREFIX).lower()
            given[option], told[option] = text, name
    for name in given:
        if name in OF_DLIO:
            raise OptionError(f"{told[name]}: not an option here: {OF_DLIO[name]} decides it")
    Options.of({name: getattr(Options, name, None) for name in given})  # unknown names
    hints = get_type_hints(Options)
    return {n: _typed(told[n], value, hints[n]) for n, value in given.items()}, told


def _typed(told: str, value: Any, hint: Any) -> Any:
    """A value as its option has it; text is read as a command line would."""
    kinds = get_args(hint) or (hint,)
    words = [word for kind in kinds for word in (get_args(kind) or (kind,))]
    if not isinstance(value, str) or value in words or kinds == (str,):
        return value
    text = value.strip().lower()
    if bool in kinds and text in _BOOLS:
        return _BOOLS[text]
    if type(None) in kinds and text in ("none", "null", ""):
        return None
    if int in kinds and (match := _SIZE.fullmatch(text)):
        number, prefix, unit = match.groups()
        base = 1000 if unit == "b" else 1024
        return int(float(number) * base ** " kmgt".index(prefix or " "))
    if float in kinds:
        return _number(told, text, float)
    raise OptionError(f"{told}={value!r}: must be {_kinds(kinds)}")


_BOOLS = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


def _kinds(kinds: tuple[Any, ...]) -> str:
    names = [getattr(kind, "__name__", str(kind)) for kind in kinds]
    return " or ".join("none" if name == "NoneType" else name for name in names)


def _number(told: str, value: Any, kind: Any = int) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise OptionError(f"{told}={value!r}: must be a number") from None


# DLIO's arguments


def _word(value: Any) -> Any:
    """DLIO's enumerations by their value."""
    return getattr(value, "value", value)


def is_2_0(args: Any) -> bool:
    """DLIO 2.0, which knows no sums of sample indices."""
    return not hasattr(args, "train_sample_index_sum")


def is_fork(args: Any) -> bool:
    """Whether it is the fork of mlcommons, which alone can give each rank a list of its own."""
    return hasattr(args, "files_pre_sharded")


def _preprocesses(args: Any) -> bool:
    time = getattr(args, "preprocess_time", 0.0)
    if isinstance(time, Mapping):
        return any(isinstance(part, int | float) and part > 0 for part in time.values())
    return float(time or 0.0) > 0
