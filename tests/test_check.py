"""The checks of arguments that all packages share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from memjax._core import check


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [
        (0, 0),
        (12, 12),
        (12.0, 12),
        (np.int64(7), 7),
        ("12B", 12),
        ("12MiB", 12 * 2**20),
        ("12mib", 12 * 2**20),
        (" 12 MiB ", 12 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("12G", 12 * 2**30),
        ("1e3 KiB", 1000 * 2**10),
        ("min", "min"),
    ],
)
def test_byte_counts_are_read(given, bytes_):
    assert check.byte_count("budget", given, words=("min",)) == bytes_


@pytest.mark.parametrize(
    "given",
    [
        "",
        "MiB",
        "infMiB",
        "nan",
        "abc",
        "-3MiB",
        "1e300GiB",
        "0.1",
        0.5,
        -1,
        float("inf"),
        float("nan"),
        10**400,
        True,
        None,
        [1],
        b"1",
    ],
)
def test_other_byte_counts_are_refused(given):
    with pytest.raises((TypeError, ValueError), match="budget must be a number of bytes or a text like"):
        check.byte_count("budget", given)


@pytest.mark.parametrize("shares", [True, False])
def test_a_byte_count_that_is_a_text_has_a_unit(shares):
    """It may be meant as gigabytes, or as percent."""
    fix = "give '50GiB', '50%' or, for bytes, '50B'" if shares else "give '50GiB' or, for bytes, '50B'"
    with pytest.raises(ValueError, match=f"budget must be a number of bytes or .*, got '50': {fix}"):
        check.byte_count("budget", "50", shares=shares)


@pytest.mark.parametrize(
    ("given", "share"), [("50%", 0.5), (" 12.5 % ", 0.125), ("100%", 1.0), ("50", None), (50, None)]
)
def test_shares_are_read(given, share):
    assert check.share_of(given) == share
    if share is not None:
        assert check.byte_count("budget", given, shares=True) == given
        with pytest.raises(ValueError, match="budget must be a number of bytes"):
            check.byte_count("budget", given)


@pytest.mark.parametrize("given", ["0%", "101%", "%", "-5%", "half"])
def test_other_shares_are_refused(given):
    with pytest.raises(ValueError, match=r"budget must be .*or '50%'.*got"):
        check.byte_count("budget", given, shares=True)


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * 2**40, "5.00 TiB")])
def test_bytes_are_readable(count, text):
    assert check.readable_bytes(count) == text


@pytest.mark.parametrize("count", [7, 1029, 1609 * 1024 + 1, 2**30 + 1])
def test_bytes_that_are_rounded_up_are_enough_as_a_budget(count):
    assert count <= check.byte_count("budget", check.readable_bytes(count, up=True)) <= 1.01 * count


def test_integers():
    assert check.integer("slots", np.int64(2), least=1) == 2
    assert type(check.integer("slots", np.int64(2))) is int
    for bad in (True, 2.0, "2", None, jnp.ones(2, int)):
        with pytest.raises(TypeError, match="slots must be an integer"):
            check.integer("slots", bad)
    with pytest.raises(ValueError, match="slots must be an integer of at least 1, got 0: keep one"):
        check.integer("slots", 0, least=1, fix="keep one")
    with pytest.raises(TypeError, match="known when tracing"):
        jax.jit(lambda n: check.integer("slots", n))(3)


def test_numbers():
    assert check.number("bound", np.float32(0.5), positive=True) == 0.5
    for bad in ("8", None, True, [1.0], jnp.ones(3)):
        with pytest.raises(TypeError, match="bound must be a finite number"):
            check.number("bound", bad)
    for bad in (float("nan"), float("inf"), 2.0, 10**400):
        with pytest.raises(ValueError, match=r"bound must be a finite number in \[0, 1\], got"):
            check.number("bound", bad, least=0, most=1)


def test_flags_choices_arrays_and_functions():
    assert check.flag("causal", np.bool_(True)) is True
    with pytest.raises(TypeError, match="causal must be True or False, got 'no'"):
        check.flag("causal", "no")
    assert check.choice("strategy", None, (None, "mixed")) is None
    with pytest.raises(ValueError, match="strategy must be one of None, 'mixed', got 'other'"):
        check.choice("strategy", "other", (None, "mixed"))
    options = "recompute", "tile", "microbatch"
    with pytest.raises(ValueError, match=r"allow must be one of .*, got 'tiles': did you mean 'tile'\?"):
        check.names("allow", ("recompute", "tiles"), options)
    with pytest.raises(
        TypeError, match=r"allow must be a sequence of names, got 'Microbatches': such as \(\"microbatch\",\)"
    ):
        check.names("allow", "Microbatches", options)
    with pytest.raises(TypeError, match=r"allow must be a sequence of names, got 'all': such as \(\"recompute\",\)"):
        check.names("allow", "all", options)
    with pytest.raises(TypeError, match="x must be an array, got None"):
        check.array("x", None)
    with pytest.raises(TypeError, match=r"x must be a floating-point array, got an array of int32\[3\]"):
        check.array("x", jnp.ones(3, jnp.int32), floating=True)
    with pytest.raises(TypeError, match=r"x must be an array, got an array of <U1\[2\]: pass jnp.asarray"):
        check.array("x", np.array(["a", "b"]))
    with pytest.raises(TypeError, match="f must be a function, got 3"):
        check.function("f", 3)


def test_functions_of_so_many_arguments():
    for good in (lambda a, b: a, lambda a, b, c=1: a, lambda *args: args, jax.jit(lambda a, b: a), max):
        assert check.function("f", good, arguments=2) is good
    for bad in (lambda a: a, lambda a, b, c: a, lambda a, *, b: a, jax.jit(lambda a: a)):
        with pytest.raises(TypeError, match=r"f must be a function of 2 arguments, got .*: as scan has it"):
            check.function("f", bad, "as scan has it", arguments=2)


def test_one_of_two_options():
    check.exactly_one(slots=3, budget=None)
    for slots, budget in ((None, None), (3, "1MiB")):
        with pytest.raises(ValueError, match=f"give exactly one of slots and budget, got slots={slots} and budget="):
            check.exactly_one(slots=slots, budget=budget)


@pytest.mark.parametrize("bad", ["fast", 3, True, [], {1: 2}, {"flag": None}])
def test_compiler_options_are_names_with_values(bad):
    with pytest.raises(TypeError, match="compiler_options must be None or a dict of names and values"):
        check.compiler_options(bad)


def test_axis_names():
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    sizes = []

    def noted(x):
        sizes.append(check.axis_size("axis_name", "ring"))
        return x

    jax.shard_map(noted, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))(jnp.ones(4))
    assert sizes == [4]
    with pytest.raises(ValueError, match=r"axis_name must be an axis of the mesh.*got 'rong': call this inside"):
        check.axis_size("axis_name", "rong")
    with pytest.raises(TypeError, match="axis_name must be the name of one mesh axis, got 3"):
        check.axis_size("axis_name", 3)
