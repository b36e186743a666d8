import errno
import inspect
import pickle
import re

import pytest

from rayloader import errors
from rayloader.errors import RayloaderError, StorageError, storage_error

EVERY = [getattr(errors, name) for name in errors.__all__]


def an_example(kind):
    if issubclass(kind, StorageError):
        return kind("some/file", "the cause", errno.EIO)
    return kind("something is wrong")


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_notes(kind):
    error = an_example(kind)
    error.add_note("rank 3, epoch 2, batch 118")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.__notes__ == error.__notes__


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_causes_of_ours_survive_pickling_and_others_stay_behind(kind):
    ours, others = an_example(kind), an_example(kind)
    ours.__cause__ = an_example(errors.SkipBudgetExceeded)
    ours.__cause__.__cause__ = errors.ObjectNotFound("a/b", "no such file", errno.ENOENT)
    others.__cause__ = KeyError(lambda: "this cannot be pickled")
    first = pickle.loads(pickle.dumps(ours)).__cause__
    assert type(first) is errors.SkipBudgetExceeded
    assert type(first.__cause__) is errors.ObjectNotFound
    assert first.__cause__.key == "a/b"
    assert pickle.loads(pickle.dumps(others)).__cause__ is None


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert sorted(drawn) == sorted(kind.__name__ for kind in EVERY if kind is not RayloaderError)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_every_error_says_what_it_is_for_and_what_to_do(kind):
    assert inspect.getdoc(kind)
    assert "cure" in vars(kind)
    assert bool(kind.cure) == (kind is not RayloaderError)


@pytest.mark.parametrize(
    ("number", "kind", "builtin"),
    [
        (errno.ENOENT, errors.ObjectNotFound, FileNotFoundError),
        (errno.EACCES, errors.AccessDenied, PermissionError),
        (errno.EISDIR, errors.NotRegularFile, OSError),
        (errno.EIO, StorageError, OSError),
    ],
)
def test_numbers_of_the_operating_system_become_typed_errors(number, kind, builtin):
    error = storage_error("a/b", number)
    assert type(error) is kind
    assert isinstance(error, builtin)
    assert (error.key, error.errno, error.filename) == ("a/b", number, "a/b")


def test_a_name_with_control_characters_does_not_break_the_line():
    text = str(errors.ObjectNotFound("a\nb\udcff", "no such file"))
    assert "\n" not in text
    text.encode()
