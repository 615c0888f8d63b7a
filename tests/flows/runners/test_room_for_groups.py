"""How many groups are handed out to the workers of a pool."""

import pytest
from prefect.client.schemas.objects import StateType

from flows.runners.work_pool import has_room

SCHEDULED, PENDING, RUNNING = StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING


@pytest.mark.parametrize(
    ("states", "is_there"),
    [
        ([], True),
        ([SCHEDULED] * 3, True),
        ([SCHEDULED] * 4, False),  # no worker has come yet
        ([PENDING] + [SCHEDULED] * 4, False),
        ([RUNNING] * 9 + [PENDING] + [SCHEDULED] * 9, True),
        ([RUNNING] * 9 + [PENDING] + [SCHEDULED] * 10, False),
        ([RUNNING] * 16, False),
    ],
)
def test_no_more_groups_wait_than_run_but_for_the_first_four(states, is_there):
    assert has_room(states, at_once=16 if len(states) == 16 else 64) is is_there


def test_all_workers_of_a_large_pool_are_soon_busy():
    """Each look at the runs finds that those that waited have begun."""
    running, looks = 0, 0
    while running < 256:
        states = [RUNNING] * running
        while has_room(states, at_once=512) and len(states) < 512:
            states.append(SCHEDULED)
        running, looks = len(states), looks + 1
    assert looks <= 8
