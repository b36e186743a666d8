import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader import config
from rayloader.config import Options
from rayloader.errors import OptionError


def test_an_unknown_option_is_an_error_that_suggests_the_nearest():
    with pytest.raises(OptionError, match="did you mean 'batch_size'"):
        Options.of({"batchsize": 3})


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": True}, {"concurrency": 0},
        {"concurrency": 100_000}, {"memory_bytes": 1}, {"part_bytes": 1000}, {"uneven": "keep"},
        {"on_error": None}, {"shuffle": 1}, {"direct": "maybe"}, {"read_timeout": 0},
        {"read_ahead_batches": -1}, {"skip_budget_share": 2}, {"seed": "x"}, {"max_restarts": -1},
        {"ray": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_is_an_error_that_names_the_option_and_the_value(bad):
    ((name, value),) = bad.items()
    with pytest.raises(OptionError) as caught:
        Options.of(bad)
    assert str(caught.value).startswith(f"{name}={value!r}: must be ")


def test_options_replace_only_what_is_said_and_stay_checked():
    options = Options(batch_size=24, direct="fallback")
    assert options.replace(concurrency=8).asdict() == {**options.asdict(), "concurrency": 8}
    with pytest.raises(OptionError):
        options.replace(concurrency=-1)


def test_options_travel():
    options = Options(batch_size=24, seed=7)
    assert pickle.loads(pickle.dumps(options)) == options


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.booleans()))
def test_whatever_comes_in_is_options_or_an_option_error(values):
    try:
        Options.of(values)
    except OptionError:
        return
    assert set(values) <= set(Options().asdict())


def test_both_engines_wait_as_long_for_a_descriptor():
    source = Path(config.__file__).with_name("storage") / "_engine.c"
    (patience,) = re.findall(r"#define FD_PATIENCE_NS (\d+)LL", source.read_text())
    assert int(patience) == config.DESCRIPTOR_SECONDS * 1e9
