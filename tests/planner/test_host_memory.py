import pytest

import echelon as ec
from echelon.planner.cluster import HostMemory

FIELDS = {"memory": 1e12, "bandwidth": 4e11, "link": 25e9}


def test_an_object_of_json_has_all_fields() -> None:
    assert HostMemory.of(FIELDS) == HostMemory(memory=1e12, bandwidth=4e11, link=25e9)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (3, "host is 3; give an object with the fields bandwidth, link, memory"),
        ({"memory": 1e12}, "give an object with the fields"),
        ({**FIELDS, "colour": 1}, "give an object with the fields"),
        ({**FIELDS, "link": 0}, "link of host is 0"),
        ({**FIELDS, "memory": "much"}, "memory of host is 'much'"),
    ],
)
def test_what_is_wrong_is_said(value: object, sentence: str) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        HostMemory.of(value)
