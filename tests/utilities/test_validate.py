import math

import numpy as np
import pytest

from lightning_fedstop.utilities.validate import flag, not_negative, one_of, positive, whole_number, within_unit


@pytest.mark.parametrize(
    ("check", "value", "kind", "allowed"),
    [
        (positive, 0, ValueError, "a finite number above 0"),
        (positive, math.nan, ValueError, "a finite number above 0"),
        (positive, math.inf, ValueError, "a finite number above 0"),
        (positive, "1", TypeError, "a finite number above 0"),
        (positive, True, TypeError, "a finite number above 0"),
        (not_negative, -1e-9, ValueError, "a finite number of at least 0"),
        (within_unit, 1.01, ValueError, r"a number in \[0, 1\]"),
        (flag, 1, TypeError, "True or False"),
    ],
)
def test_a_range_is_a_value_error_and_a_type_a_type_error(check, value, kind, allowed):
    with pytest.raises(kind, match=rf"^`x` must be {allowed}, got {value!r}\.$"):
        check("x", value)


@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)])
def test_whole_numbers(value, kind):
    assert whole_number("x", np.int64(3), least=1) == 3
    with pytest.raises(kind, match="`x` must be an integer of at least 1, got"):
        whole_number("x", value, least=1)


def test_the_owner_is_named():
    with pytest.raises(ValueError, match=r"^`x` of list must be one of 'a', None, got 'b'\.$"):
        one_of("x", "b", ("a", None), owner=[])
    assert (positive("x", np.float32(0.5)), not_negative("x", 0), within_unit("x", 1)) == (0.5, 0.0, 1.0)
